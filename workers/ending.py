"""How a request ends on its worker: every token confirmed, then StreamEnd, then its log line."""

from __future__ import annotations

import time

from infra.bus import TokenWriter
from infra.log import Logger
from infra.metrics import Metrics
from schemas.errors import DeadlineExceeded
from schemas.tokens import StreamEnd, Usage
from workers.claims import Claims
from workers.engine.api import FinishedRequest, HeldRequest
from workers.kv.origins import OriginCounts
from workers.running import Running

_FLUSH_S = 2.0


class Endings:
    """Stores the ends of the requests of one worker id, and tells of them."""

    def __init__(self, claims: Claims, writer: TokenWriter, metrics: Metrics, log: Logger) -> None:
        self._claims = claims
        self._writer = writer
        self._origins = OriginCounts(metrics)
        self._log = log

    async def store(self, running: Running, finished: FinishedRequest) -> str:
        """Store a request's end through outages, until its deadline; a word for how that went."""
        claimed, entry = running.claimed, _entry(running, finished)

        async def end() -> int | None:
            await self._writer.flush(_FLUSH_S)
            return await self._claims.chain.append(claimed.reader, entry, claimed.seq)

        try:
            seq = await self._claims.through_outages(claimed.record, end)
        except DeadlineExceeded:
            return "expired"
        return "superseded" if seq is None else "ended"

    def tell(self, running: Running, outcome: str, ended: HeldRequest | FinishedRequest) -> None:
        """The canonical line of this stage, and where its prompt's KV came from."""
        claimed, now_s = running.claimed, time.perf_counter()
        origins = running.origins(ended.num_cached_tokens, ended.num_host_tokens)
        self._origins.add(origins)
        first_s = running.first_token_s or now_s
        self._log.info(
            "request_executed",
            stage=claimed.role,
            outcome=outcome,
            request_id=claimed.record.request_id,
            epoch=claimed.epoch,
            prompt_tokens=running.num_prompt_tokens,
            **origins.facts(),
            new_tokens=running.num_new_tokens,
            first_token_ms=round((first_s - running.started_s) * 1000, 2),
            total_ms=round((now_s - running.started_s) * 1000, 2),
        )


def _entry(running: Running, finished: FinishedRequest) -> StreamEnd:
    claimed, num_prompt = running.claimed, running.num_prompt_tokens
    num_cached = min(running.num_cached_tokens + finished.num_cached_tokens, num_prompt)
    is_answered = claimed.record.sampling.max_tokens != 0  # else the one token is hidden
    return StreamEnd(
        request_id=claimed.record.request_id,
        epoch=claimed.epoch,
        num_tokens=finished.num_tokens,
        finish_reasons=finished.finish_reasons,
        usage=Usage(
            prompt_tokens=num_prompt,
            completion_tokens=sum(finished.num_tokens) if is_answered else 0,
            cached_tokens=num_cached,
        ),
    )
