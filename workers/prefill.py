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

from pipeline.stage import Handled, Work
from schemas.errors import BusUnavailable, MeshError, SchemaError
from schemas.prefill import PrefillTask
from workers.claims import Claimed, Claims
from workers.execution import Execution


class Prefill:
    """The prefill stage's handler."""

    def __init__(self, claims: Claims, execution: Execution) -> None:
        self._claims = claims
        self._execution = execution

    async def handle(self, work: Work[PrefillTask]) -> Handled:
        """Claim, find the tokens that exist, give it to the engine."""
        task = work.message
        await self._execution.trace.mark(task.request_id, "prefill_received")
        record = task.record
        if record is None:
            found = await self._claims.chain.record(task.request_id)
            if found is None:
                raise SchemaError(f"no record of request {task.request_id}", param="request_id")
            record = found[1]
        seq = await self._claims.claim(record, task.epoch, task.after_seq, "prefill")
        if not seq:
            return Handled(outcome="superseded")
        fresh = Claimed(
            record=record,
            epoch=task.epoch,
            seq=seq,
            role="prefill",
            tokens=(),
            finished=(),
            traceparent=work.headers.traceparent,
        )
        self._execution.spawn(self._start(fresh, is_new=task.after_seq == 0), f"start {fresh.key}")
        return Handled(outcome="claimed")

    async def _start(self, fresh: Claimed, *, is_new: bool) -> None:
        """The claim is stored: from here on the request is ours to end or to give back."""
        try:
            claimed = fresh if is_new else await self._taken_over(fresh)
        except BusUnavailable as error:
            await self._claims.give_back(fresh, error.code)
        except MeshError as error:
            await self._claims.fail(fresh, error)
        else:
            await self._execution.start(claimed)

    async def _taken_over(self, fresh: Claimed) -> Claimed:
        """The same with the tokens that its stream holds; they are never sampled again."""
        view = await self._claims.view(fresh.record, fresh.seq)
        self._claims.check_poison(view)
        num_choices = fresh.record.sampling.n
        return Claimed(
            record=fresh.record,
            epoch=fresh.epoch,
            seq=fresh.seq,
            role=fresh.role,
            tokens=view.tokens(num_choices),
            finished=view.finish_reasons(num_choices),
            traceparent=fresh.traceparent,
        )
