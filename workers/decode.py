"""Decode: pull a prompt's blocks by handle, then generate.

Consumes   mesh.v1.decode.<model@rev>.<worker|any>             DecodeTask
Publishes  mesh.v1.token-stream.<reader>.claim.<id>            Claim; StreamEnd, StreamError
           mesh.v1.token-stream.<reader>.tokens                TokenBatch, one per step and reader
           mesh.v1.lease.<owner>                               LeaseRelease, LeaseRenew
           mesh.v1.prefill.<model@rev>.any                     PrefillTask, when blocks are lost
Keeps      the running batch; nothing of a request after its end
Twice?     the claim decides; whoever finds the request ended or gone on releases its lease
Fails      NoCapacity -> later;  KvLost -> prefilled again under the next epoch
"""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from infra.bus import Bus
from infra.log import Logger
from pipeline.stage import Handled, Work
from schemas import subjects
from schemas.codec import encode, unpack_ids
from schemas.decode import DecodeTask
from schemas.errors import BusUnavailable, KvLost, MeshError
from schemas.kv import KvReady, LeaseRelease, LeaseRenew
from schemas.requests import RequestRecord
from schemas.tokens import Claim
from workers.claims import Claimed, Claims, key_of
from workers.execution import Execution, Import
from workers.kv.intake import READ_S, Arrival, KvIntake

_RENEWALS = 3  # in the time of a lease: one may be lost


class Decode:
    """The decode stage's handler."""

    def __init__(
        self, bus: Bus, claims: Claims, execution: Execution, intake: KvIntake, log: Logger
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._execution = execution
        self._intake = intake
        self._log = log

    async def handle(self, work: Work[DecodeTask]) -> Handled:
        """Make room, then claim while the blocks are being copied. A copy for a claim that is
        lost went into blocks that nobody used."""
        task = work.message
        self._execution.trace.mark(task.request_id, "decode_received")
        with self._claims.attempt(task) as is_first:
            if not is_first:
                return Handled(outcome="repeated")
            record = await self._claims.record_of(task)
            key, claimed = key_of(task), None
            timeout_s = self._time_to_read_s(record)
            arrival = await self._intake.fetch(key, task.ready.handle, timeout_s)
            try:
                claimed = await self._claims.claim(work, record, "decode")
            finally:
                if claimed is None:
                    self._intake.release(key)
        if claimed is None:
            await self._release_if_unread(task)
            return Handled(outcome="superseded")
        self._execution.spawn(self._start(claimed, task.ready, arrival), f"start {key}")
        return Handled(outcome="claimed")

    async def _start(self, claimed: Claimed, ready: KvReady, arrival: Arrival) -> None:
        """The claim is stored: from here on the request is ours to end or to give back."""
        try:
            tokens = tuple(tuple(unpack_ids(run)) for run in ready.tokens)
            while not await arrival.is_there(self._bus.times.lease_s / _RENEWALS):
                await self._renew(ready)
            await self._release(ready, ok=True)
        except MeshError as error:
            self._intake.release(claimed.key)
            await self._release(ready, ok=False)
            if isinstance(error, KvLost):
                await self._claims.give_back(claimed, error.message)
            else:
                await self._claims.fail(claimed, error)
        except asyncio.CancelledError:
            self._intake.release(claimed.key)
            raise
        else:
            await self._execution.start(
                replace(claimed, tokens=tokens, finished=ready.finished),
                Import(blocks=arrival.blocks, num_tokens=arrival.num_tokens),
                ready.num_cached_tokens,
            )

    async def _release_if_unread(self, task: DecodeTask) -> None:
        """A lost claim: unless another decode worker reads the blocks, nobody will."""
        tip = await self._claims.chain.tip(task.reader, task.request_id)
        entry = tip.entry
        if isinstance(entry, Claim) and entry.epoch == task.epoch and entry.role == "decode":
            return
        await self._release(task.ready, ok=False)

    def _time_to_read_s(self, record: RequestRecord) -> float:
        """Half of what is left: the other half is for computing the blocks again."""
        left_s = (record.deadline_unix_ms - self._bus.now_unix_ms()) / 1000
        return min(READ_S, max(0.0, left_s / 2))

    async def _release(self, ready: KvReady, *, ok: bool) -> None:
        handle = ready.handle
        await self._tell_owner(
            handle.owner, LeaseRelease(lease_id=handle.lease_id, secret=handle.secret, ok=ok)
        )

    async def _renew(self, ready: KvReady) -> None:
        handle = ready.handle
        await self._tell_owner(
            handle.owner, LeaseRenew(lease_id=handle.lease_id, secret=handle.secret)
        )

    async def _tell_owner(self, owner: str, word: LeaseRelease | LeaseRenew) -> None:
        try:
            await self._bus.publish(subjects.lease(owner), encode(word))
        except BusUnavailable:
            self._log.info("lease_left_to_expire", lease_id=word.lease_id)
