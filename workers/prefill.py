"""Prefill: turn a prompt into KV blocks that another worker can read.

Consumes   mesh.v1.prefill.<model@rev>.<worker|any>            PrefillTask
Publishes  mesh.v1.token-stream.<reader>.claim.<id>            Claim; StreamEnd, StreamError
           mesh.v1.token-stream.<reader>.tokens                the next token (token 0 at first)
           mesh.v1.kv-ready.<model@rev>                        KvReady
Keeps      blocks, each leased, until they are read; nothing else between messages
Twice?     the claim decides; tokens that exist are used, blocks found by hash are used again
Fails      the record is gone -> StreamError;  no progress in three epochs -> Poisoned
"""

from __future__ import annotations

from infra.bus import Bus
from pipeline.stage import Handled, Work
from schemas.errors import MeshError
from schemas.prefill import PrefillTask
from workers.claims import Claimed, Claims
from workers.execution import Execution
from workers.stored_tokens import with_stored_tokens


class Prefill:
    """The prefill stage's handler."""

    def __init__(self, bus: Bus, claims: Claims, execution: Execution) -> None:
        self._bus = bus
        self._claims = claims
        self._execution = execution

    async def handle(self, work: Work[PrefillTask]) -> Handled:
        """Claim, find the tokens that exist, give it to the engine."""
        task = work.message
        await self._execution.trace.mark(task.request_id, "prefill_received")
        with self._claims.attempt(task) as is_first:
            if not is_first:
                return Handled(outcome="repeated")
            record = await self._claims.record_of(task)
            claimed = await self._claims.claim(work, record, "prefill")
        if claimed is None:
            return Handled(outcome="superseded")
        start = self._start(claimed, is_new=task.after_seq == 0)
        self._execution.spawn(start, f"start {claimed.key}")
        return Handled(outcome="claimed")

    async def _start(self, claimed: Claimed, *, is_new: bool) -> None:
        """The claim is stored: from here on the request is ours to end or to give back."""
        try:
            if not is_new:
                claimed = await self._claims.through_outages(
                    claimed.record,
                    lambda: with_stored_tokens(self._bus, self._claims.chain, claimed),
                )
        except MeshError as error:
            await self._claims.fail(claimed, error)
        else:
            await self._execution.start(claimed)
