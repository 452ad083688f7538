"""How the messages of a stage end that do not end in what comes next.

    retryable error    delivered again after a pause
    another error      StreamError on the chain: the client hears of it
    a bug              delivered again a few times; then dead letter, StreamError
    no such message    dead letter, and StreamError where the request is known
    past its deadline  Expired on the chain

Each returns its word for log and metrics, and raises BusUnavailable when it could not be done: the
message then comes again.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.bus import Bus, WorkMessage
from infra.log import Logger
from infra.metrics import Metrics
from pipeline.claim_chain import ClaimChain
from pipeline.dead_letters import bury, known_request
from schemas.errors import EngineFailed, MeshError, QueueFull
from schemas.headers import WorkHeaders
from schemas.tokens import Expired, StreamError

CRASH_LIMIT = 3  # deliveries of a message whose handler raises what it should not
_RETRY_S = (0.05, 0.2, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What every stage of a process shares."""

    bus: Bus
    chain: ClaimChain
    metrics: Metrics
    log: Logger
    process: str


class Endings:
    """Ends messages of one stage."""

    def __init__(self, ctx: StageContext, stage: str) -> None:
        self._ctx = ctx
        self._stage = stage

    async def expired(self, message: WorkMessage, reader: str, headers: WorkHeaders) -> str:
        """Its deadline has passed."""
        await self._ctx.chain.end(reader, Expired(request_id=headers.request_id))
        await message.ack()
        return "expired"

    async def refused(
        self,
        message: WorkMessage,
        reader: str,
        headers: WorkHeaders,
        error: MeshError,
        full: QueueFull | None,
    ) -> str:
        """The handler raised ``error``; ``full`` is what the client hears in its place when a queue
        is full and its requests do not wait for room."""
        if error.retryable and full is None:
            pause = _RETRY_S[min(message.num_delivered, len(_RETRY_S)) - 1]
            await message.nak(pause)
            return "later"
        await self._end(reader, headers, full or error)
        await message.ack()
        return "refused"

    async def crashed(
        self, message: WorkMessage, data: bytes, reader: str, headers: WorkHeaders
    ) -> str:
        """The handler raised what it should not: a bug, or something only this message does."""
        if message.num_delivered < CRASH_LIMIT:
            await message.nak(_RETRY_S[-1])
            return "crashed"
        error = EngineFailed(f"the {self._stage} stage failed on this request")
        await self._bury(message, data, error)
        await self._end(reader, headers, error)
        await message.term("handler failed")
        return "dead"

    async def undecodable(
        self, message: WorkMessage, data: bytes, error: MeshError, facts: dict[str, str]
    ) -> str:
        """``data`` is no message of this stage; ``facts`` are filled for the log."""
        facts |= {"code": error.code, "param": error.param or "", "reason": error.message}
        known = await known_request(self._ctx.chain, message.headers, data)
        if known is not None:
            facts["request_id"] = known.request_id
            failed = StreamError(request_id=known.request_id, epoch=0, error=error.info)
            await self._ctx.chain.end(known.reader, failed)
        await self._bury(message, data, error)
        await message.term(error.code)
        return "dead"

    async def _bury(self, message: WorkMessage, data: bytes, error: MeshError) -> None:
        await bury(self._ctx.bus, message, data, error, self._stage, self._ctx.process)
        self._ctx.metrics.dead_letters.labels(self._stage).inc()

    async def _end(self, reader: str, headers: WorkHeaders, error: MeshError) -> None:
        self._ctx.metrics.requests_refused.labels(error.code).inc()
        failed = StreamError(request_id=headers.request_id, epoch=headers.epoch, error=error.info)
        await self._ctx.chain.end(reader, failed)
