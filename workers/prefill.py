"""Prefill: turn a prompt into KV blocks that another worker can read.

Consumes   mesh.v1.prefill.<model@rev>.<worker|any>            PrefillTask
           (a decode worker: only those placed with it by name, and to the end of the answer)
Asks       mesh.v1.kv-lend.<worker>                            KvLend: others' blocks
Publishes  mesh.v1.request.<id>                                RequestRecord, if nobody has
           mesh.v1.token-stream.<reader>.claim.<id>            Claim; StreamEnd, StreamError
           mesh.v1.token-stream.<reader>.tokens                the next token (token 0 at first)
           mesh.v1.kv-ready.<model@rev>                        KvReady
Keeps      blocks, each leased, until they are read; nothing else between messages
Twice?     the claim decides; tokens that exist are used, blocks found by hash are used again
Fails      the record is gone -> StreamError;  no progress in three epochs -> Poisoned
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from infra.bus import Bus
from pipeline.stage import Handled, Work
from schemas.codec import decode
from schemas.errors import MeshError
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from workers.claims import Claimed, Claims, as_claimed, key_of
from workers.execution import Execution
from workers.kv.borrowing import Lenders
from workers.kv.prefetch import Bringing, Prefetch
from workers.stored_tokens import with_stored_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Where prefixes come from that the engine does not have."""

    prefetch: Prefetch
    lenders: Lenders


class Prefill:
    """The prefill stage's handler.

    Args:
        prefix: brings prefixes that are elsewhere; None: they are computed.
    """

    def __init__(
        self, bus: Bus, claims: Claims, execution: Execution, prefix: Prefix | None = None
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._execution = execution
        self._prefix = prefix

    async def handle(self, work: Work[PrefillTask]) -> Handled:
        """Claim while a known prefix is being fetched, or the engine computes; find the tokens that
        exist, give it to the engine."""
        task = work.message
        self._execution.trace.mark(task.request_id, "prefill_received")
        with self._claims.attempt(task) as is_first:
            if not is_first:
                return Handled(outcome="repeated")
            record = await self._claims.record_of(task)
            is_new = task.after_seq == 0  # else there may be tokens
            bringing = self._bring(task, record)
            # What lies in a queue may have been claimed by one that it killed: claimed first.
            if work.is_direct and is_new and bringing is None:
                self._execution.plan(as_claimed(work, record, "prefill"))
            claimed = await self._claim(work, record, bringing)
        if claimed is None:
            return Handled(outcome="superseded")
        if claimed.record is not record:
            bringing = None
        if claimed.record.served != record.served:
            await self._claims.give_back(claimed, "admitted for another revision")
            return Handled(outcome="given_back")
        if not self._execution.adopt(claimed):
            start = self._start(claimed, bringing, is_new=is_new)
            self._execution.spawn(start, f"start {claimed.key}")
        return Handled(outcome="claimed")

    async def _claim(
        self, work: Work[PrefillTask], record: RequestRecord, bringing: Bringing | None
    ) -> Claimed | None:
        """Our claim, None when another was first. Without it, or when another record was written
        before and counts, what was begun or is being fetched is let go."""
        claimed, key = None, key_of(work.message)
        begin = partial(self._execution.begin, key)
        try:
            claimed = await self._claims.claim(work, record, "prefill", begin)
            return claimed
        finally:
            if claimed is None or claimed.record is not record:
                _drop(bringing)
                self._execution.give_up(key)

    async def before_queue(self, data: bytes) -> None:
        """Store the record of a task that came directly: no task lies in the queue without."""
        task = decode(data, PrefillTask)
        if task.record is not None and not task.is_recorded:
            await self._claims.chain.write_record(task.record)

    def _bring(self, task: PrefillTask, record: RequestRecord) -> Bringing | None:
        prefix = self._prefix
        others = [one for one in task.kv_sources if one.worker != self._claims.worker]
        if prefix is None or not prefix.prefetch.has_use(others):
            return None
        work = prefix.prefetch.bring(record, others, prefix.lenders)
        return Bringing(self._execution.spawn(work, f"bring {task.request_id}"))

    async def _start(self, claimed: Claimed, bringing: Bringing | None, *, is_new: bool) -> None:
        """The claim is stored: from here on the request is ours to end or to give back."""
        try:
            if not is_new:
                claimed = await self._claims.through_outages(
                    claimed.record,
                    lambda: with_stored_tokens(self._bus, self._claims.chain, claimed),
                )
            brought = None if bringing is None else await bringing.complete()
        except MeshError as error:
            _drop(bringing)
            await self._claims.fail(claimed, error)
        except asyncio.CancelledError:
            _drop(bringing)
            raise
        else:
            await self._execution.start(claimed, brought=brought)


def _drop(bringing: Bringing | None) -> None:
    if bringing is not None:
        bringing.drop()
