"""Decode: pull a prompt's blocks by handle, then generate.

Consumes   mesh.v1.decode.<model@rev>.<worker|any>             DecodeTask
Publishes  mesh.v1.token-stream.<reader>.claim.<id>            Claim; StreamEnd, StreamError
           mesh.v1.token-stream.<reader>.tokens                TokenBatch, one per step and reader
           mesh.v1.lease.<owner>                               LeaseRelease
           mesh.v1.prefill.<model@rev>.any                     PrefillTask, when blocks are lost
Keeps      the running batch; nothing of a request after its end
Twice?     the claim decides; whoever finds the request ended or gone on releases its lease
Fails      NoCapacity -> later;  KvLost -> prefilled again under the next epoch
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from infra.bus import Bus
from infra.log import Logger
from infra.metrics import Metrics
from infra.transport.handover import PoolReader
from infra.transport.shm import SharedPool
from pipeline.stage import Handled, Work
from schemas import subjects
from schemas.codec import encode, unpack_ids
from schemas.decode import DecodeTask
from schemas.errors import BusUnavailable, KvLost, NoCapacity, SchemaError
from schemas.kv import KvReady, LeaseRelease
from schemas.tokens import Claim
from workers.claims import Claimed, Claims
from workers.engine.api import EngineApi
from workers.engine.thread import EngineThread
from workers.execution import ENGINE_CALL_S, Execution, Import


class Decode:
    """The decode stage's handler.

    Args:
        memory: this worker's own pool, into which blocks are copied.
        reader: maps other workers' pools; used on one thread at a time.
    """

    def __init__(
        self,
        bus: Bus,
        claims: Claims,
        execution: Execution,
        engine: EngineThread,
        memory: SharedPool,
        fingerprint: str,
        reader: PoolReader,
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._execution = execution
        self._engine = engine
        self._memory = memory
        self._fingerprint = fingerprint
        self._reader = reader
        self._metrics = metrics
        self._log = log
        self._one_at_a_time = asyncio.Lock()

    async def handle(self, work: Work[DecodeTask]) -> Handled:
        """Make room, claim, then copy the blocks beside the running batch."""
        task = work.message
        key = f"{task.request_id}.{task.epoch}"
        reserved = await self._reserve(key, task.ready.handle.num_tokens)
        claimed: Claimed | None = None
        try:
            claimed = await self._claim(work)
        finally:
            if claimed is None:
                self._execution.release(key)
        if claimed is None:
            await self._release_if_unread(task)
            return Handled(outcome="superseded")
        started = self._start(claimed, task.ready, reserved)
        self._execution.spawn(started, f"start {key}")
        return Handled(outcome="claimed")

    async def _reserve(self, key: str, num_tokens: int) -> tuple[int, ...]:
        async with asyncio.timeout(ENGINE_CALL_S):
            reserved = await self._engine.call(_reserve(key, num_tokens))
        if reserved is None:
            raise NoCapacity("no room in the KV pool now")
        return reserved

    async def _claim(self, work: Work[DecodeTask]) -> Claimed | None:
        task, ready = work.message, work.message.ready
        record = ready.record
        if record is None:
            found = await self._claims.chain.record(task.request_id)
            if found is None:
                raise SchemaError(f"no record of request {task.request_id}", param="request_id")
            record = found[1]
        seq = await self._claims.claim(record, task.epoch, task.after_seq, "decode")
        if not seq:
            return None
        return Claimed(
            record=record,
            epoch=task.epoch,
            seq=seq,
            role="decode",
            tokens=tuple(tuple(unpack_ids(run)) for run in ready.tokens),
            finished=ready.finished,
            traceparent=work.headers.traceparent,
        )

    async def _start(self, claimed: Claimed, ready: KvReady, blocks: tuple[int, ...]) -> None:
        """The claim is stored: from here on the request is ours to end or to give back."""
        try:
            await self._copy(ready, blocks)
        except KvLost as error:
            self._log.warning("kv_lost", request_id=claimed.record.request_id, reason=error.message)
            self._execution.release(claimed.key)
            await self._release(ready, ok=False)
            await self._claims.give_back(claimed, error.code)
            return
        imported = Import(blocks=blocks, num_tokens=ready.handle.num_tokens)
        await self._execution.start(claimed, imported, ready.num_cached_tokens)
        await self._execution.trace.mark(claimed.record.request_id, "decode_received")
        await self._release(ready, ok=True)

    async def _copy(self, ready: KvReady, blocks: tuple[int, ...]) -> None:
        handle = ready.handle
        if handle.fingerprint != self._fingerprint:
            raise KvLost(f"blocks of {handle.owner} have another layout or model")
        started_s = time.perf_counter()
        async with self._one_at_a_time:
            await asyncio.to_thread(self._reader.read, handle, self._memory, blocks)
        self._metrics.kv_transfer_seconds.observe(time.perf_counter() - started_s)
        self._metrics.kv_transfer_bytes.inc(len(blocks) * self._memory.block_bytes)

    async def _release_if_unread(self, task: DecodeTask) -> None:
        """A lost claim: unless another decode worker reads the blocks, nobody will."""
        tip = await self._claims.chain.tip(task.reader, task.request_id)
        entry = tip.entry
        if isinstance(entry, Claim) and entry.epoch == task.epoch and entry.role == "decode":
            return
        await self._release(task.ready, ok=False)

    async def _release(self, ready: KvReady, *, ok: bool) -> None:
        handle = ready.handle
        release = LeaseRelease(lease_id=handle.lease_id, secret=handle.secret, ok=ok)
        try:
            await self._bus.publish(subjects.lease(handle.owner), encode(release))
        except BusUnavailable:
            self._log.info("lease_left_to_expire", lease_id=handle.lease_id)


def _reserve(key: str, num_tokens: int) -> Callable[[EngineApi], tuple[int, ...] | None]:
    return lambda engine: engine.reserve(key, num_tokens)
