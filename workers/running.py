"""A claimed request while the engine has it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.prefix_hash import ID_BYTES
from schemas.tokens import TokenDelta
from workers.claims import Claimed
from workers.engine.api import TokenOutput
from workers.kv.origins import Origins, origins_of
from workers.kv.prefetch import Brought


class Running:
    """A claimed request in the engine, and the tokens it has by now."""

    __slots__ = (
        "_is_scored",
        "_num_old_tokens",
        "brought",
        "claimed",
        "epoch",
        "finished",
        "first_token_s",
        "num_cached_tokens",
        "num_imported_tokens",
        "reader",
        "request_id",
        "started_s",
        "tokens",
    )

    def __init__(
        self,
        claimed: Claimed,
        num_cached_tokens: int = 0,
        num_imported_tokens: int = 0,
        brought: Brought | None = None,
    ) -> None:
        sampling = claimed.record.sampling
        num_choices = sampling.n
        self.claimed = claimed
        self.reader = claimed.reader
        self.request_id = claimed.record.request_id
        self.epoch = claimed.epoch
        self.num_cached_tokens = num_cached_tokens  # as the prefill worker found them
        self.num_imported_tokens = num_imported_tokens
        self.brought = brought or Brought()
        self.tokens = [list(run) for run in claimed.tokens or ((),) * num_choices]
        self.finished = list(claimed.finished or ("",) * num_choices)
        self._is_scored = not (sampling.logprobs is None and sampling.prompt_logprobs is None)
        self.started_s = time.perf_counter()
        self.first_token_s = 0.0
        self._num_old_tokens = sum(map(len, self.tokens))

    @property
    def num_prompt_tokens(self) -> int:
        """Of the request."""
        return len(self.claimed.record.prompt_ids) // ID_BYTES

    @property
    def num_new_tokens(self) -> int:
        """Those that it has got here."""
        return sum(map(len, self.tokens)) - self._num_old_tokens

    def origins(self, num_cached: int, num_host: int) -> Origins:
        """Where its prompt's KV came from, by what the engine found: in all, and of that in the
        host tier."""
        return origins_of(
            self.num_prompt_tokens,
            num_cached=num_cached,
            num_promoted=num_host,
            num_disk=self.brought.num_disk_tokens,
            num_remote=self.brought.num_remote_tokens,
            num_imported=self.num_imported_tokens,
        )

    def take_all(self, outputs: Sequence[TokenOutput]) -> list[TokenDelta]:
        """Note new tokens of several steps, in order; a delta per choice, or one per token where
        logprobs are asked for."""
        if len(outputs) == 1 or self._is_scored:
            return [self.take(output) for output in outputs]
        if len(self.tokens) == 1:
            return [self._take_run(outputs)]
        runs = [[one for one in outputs if one.index == i] for i in range(len(self.tokens))]
        return [self._take_run(run) for run in runs if run]

    def take(self, output: TokenOutput) -> TokenDelta:
        """Note a new token; the delta that tells of it."""
        index, token_id = output.index, output.token_id
        self.tokens[index].append(token_id)
        if output.finish_reason is not None:
            self.finished[index] = output.finish_reason
        return TokenDelta(
            request_id=self.request_id,
            epoch=self.epoch,
            number=output.number,
            ids=(token_id,),
            text=output.text,
            index=index,
            finish_reason=output.finish_reason,
            logprobs=None if output.logprob is None else (output.logprob,),
            prompt_logprobs=output.prompt_logprobs,
        )

    def _take_run(self, run: Sequence[TokenOutput]) -> TokenDelta:
        first, last = run[0], run[-1]
        index, ids = first.index, [output.token_id for output in run]
        self.tokens[index] += ids
        if last.finish_reason is not None:
            self.finished[index] = last.finish_reason
        return TokenDelta(
            request_id=self.request_id,
            epoch=self.epoch,
            number=first.number,
            ids=tuple(ids),
            text="".join([output.text for output in run]),
            index=index,
            finish_reason=last.finish_reason,
            sizes=tuple([len(output.text) for output in run[:-1]]),
        )
