"""Offering computed blocks to decode workers: leases, handles, and how they end.

A held request's blocks stay in the engine while its lease stands. It ends when a reader releases
it, or at its expiry when the request has gone on without it. A request that still waits for its
decode worker gets its lease renewed, and a reader that takes its time extends it, until the
request's deadline.

All leases of the worker end here, those on its loans too: readers say so on one subject.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from infra.bus import Bus, Msg, TokenWriter, publish_work
from infra.log import Logger
from infra.metrics import Metrics
from infra.pulse import next_pulse
from infra.task_scope import task_scope
from infra.transport.handover import checksums
from schemas import subjects
from schemas.codec import decode, encode, pack_ids, tag_of
from schemas.errors import BusUnavailable, DeadlineExceeded, MeshError, SchemaError
from schemas.headers import WorkHeaders
from schemas.kv import KvHandle, KvReady, LeaseRelease, LeaseRenew
from workers.claims import Claimed, Claims
from workers.engine.api import HeldRequest
from workers.engine.thread import EngineThread
from workers.hops import HopTrace
from workers.kv.handles import PoolFacts
from workers.kv.leases import Lease, LeaseBook
from workers.running import Running

INLINE_RECORD_BYTES = 64 * 1024  # longer ones are read from mesh.v1.request.<id>
_FLUSH_S = 2.0
_Word = LeaseRelease | LeaseRenew
_INLINE_CHECK_BYTES = 4 << 20  # 0.3 ms of checksums; more is done on another thread


class Offers:
    """The handles that one worker id gives out.

    Args:
        engine: where held requests are, and released.
        leases: of this process: its pool's door asks the same book.
    """

    def __init__(
        self,
        bus: Bus,
        claims: Claims,
        writer: TokenWriter,
        engine: EngineThread,
        pool: PoolFacts,
        leases: LeaseBook,
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._writer = writer
        self._engine = engine
        self._trace = HopTrace(bus, claims.worker)
        self._pool = pool
        self._leases = leases
        self._metrics = metrics
        self._log = log
        self._waiting: dict[str, Claimed] = {}  # by lease: not known to be read yet
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_waiting(self) -> int:
        """Leases that stand."""
        return len(self._waiting)

    @property
    def num_choices(self) -> int:
        """How many sequences wait behind them."""
        return sum(claimed.num_choices for claimed in self._waiting.values())

    def waiting(self) -> list[Claimed]:
        """The requests behind them."""
        return list(self._waiting.values())

    def offer(self, running: Running, held: HeldRequest) -> None:
        """Give a lease on a held request's blocks and announce it."""
        now_s = time.monotonic()
        left_s = (running.claimed.record.deadline_unix_ms - self._bus.now_unix_ms()) / 1000
        lease = self._leases.give(
            held.key, self._bus.times.lease_s, now_s, now_s + left_s, on_end=self._end
        )
        self._waiting[lease.lease_id] = running.claimed
        self._metrics.leases.set(len(self._leases))
        assert self._tasks is not None, "run comes first"
        self._tasks.create_task(self._announce(running, held, lease), name=f"offer {held.key}")

    async def run(self) -> None:
        """Announce, hear readers and look after expiries, until cancelled."""
        async with task_scope() as self._tasks:
            subject = subjects.lease(self._claims.worker)
            subscription = await self._bus.subscribe(subject, self._hear_reader)
            try:
                while True:
                    await next_pulse(self._bus.times.beat_s)
                    for lease in self._leases.expired(time.monotonic()):
                        await self._settle_expired(lease)
            finally:
                await subscription.unsubscribe()

    def drop(self, claimed: Claimed) -> None:
        """End the lease on a request that is not ours any more, if there is one."""
        for lease_id, waiting in list(self._waiting.items()):
            if waiting.key == claimed.key and (lease := self._leases.take_off(lease_id)):
                self._end(lease, "dropped")

    def end_all(self) -> None:
        """Take every lease back: this worker id is given up."""
        for lease in self._leases.take_all():
            lease.on_end(lease, "expired")

    async def _announce(self, running: Running, held: HeldRequest, lease: Lease) -> None:
        """The tokens confirmed, then KvReady; through outages, until the deadline."""
        claimed = running.claimed
        try:
            ready = await self._ready(running, held, lease)
            await self._claims.through_outages(
                claimed.record, lambda: self._publish(claimed, ready, lease)
            )
        except DeadlineExceeded:
            self.drop(claimed)
        except MeshError as error:  # too large for the bus, for instance
            await self._claims.fail(claimed, error)
            self.drop(claimed)

    async def _publish(self, claimed: Claimed, ready: KvReady, lease: Lease) -> None:
        await self._writer.flush(_FLUSH_S)
        if lease.lease_id not in self._waiting:
            return  # cancelled meanwhile
        record = claimed.record
        headers = WorkHeaders(
            schema=tag_of(KvReady),
            request_id=record.request_id,
            epoch=claimed.epoch,
            deadline_unix_ms=record.deadline_unix_ms,
            traceparent=claimed.traceparent,
        )
        msg_id = f"{record.request_id}.kv-ready.{claimed.epoch}"
        self._trace.mark(record.request_id, "kv_ready_published")
        subject = subjects.kv_ready(record.served)
        await publish_work(self._bus, subject, encode(ready), headers, msg_id=msg_id)

    async def _ready(self, running: Running, held: HeldRequest, lease: Lease) -> KvReady:
        claimed = running.claimed
        record = claimed.record
        return KvReady(
            request_id=record.request_id,
            epoch=claimed.epoch,
            after_seq=claimed.seq,
            reader=claimed.reader,
            worker=self._claims.worker,
            handle=await self._handle(held, lease),
            tokens=tuple(pack_ids(run) for run in running.tokens),
            finished=tuple(running.finished),
            num_cached_tokens=held.num_cached_tokens,
            record=record if len(record.prompt_ids) <= INLINE_RECORD_BYTES else None,
        )

    async def _handle(self, held: HeldRequest, lease: Lease) -> KvHandle:
        blocks = list(held.blocks)
        checksums = await self._checksums(blocks)
        owner = self._claims.worker
        return self._pool.handle(self._bus, owner, lease, blocks, held.num_tokens, checksums)

    async def _checksums(self, blocks: list[int]) -> bytes:
        memory = self._pool.memory
        if len(blocks) * memory.block_bytes <= _INLINE_CHECK_BYTES:
            return checksums(memory, blocks)
        return await asyncio.to_thread(checksums, memory, blocks)

    def _hear_reader(self, message: Msg) -> None:
        try:
            word = decode(message.data, cast("type[_Word]", _Word))
        except SchemaError as error:
            self._log.warning("lease_message_refused", reason=error.message)
            return
        if isinstance(word, LeaseRenew):
            lease_s, now_s = self._bus.times.lease_s, time.monotonic()
            self._leases.extend(word.lease_id, word.secret, lease_s, now_s)
            return
        lease = self._leases.release(word.lease_id, word.secret)
        if lease is not None:
            lease.on_end(lease, "released")

    async def _settle_expired(self, lease: Lease) -> None:
        claimed = self._waiting.get(lease.lease_id)
        if claimed is None:  # a loan, or it ended while another was looked at
            is_over = lease.expires_s <= time.monotonic()  # nor was it extended meanwhile
            if is_over and self._leases.take_off(lease.lease_id):
                lease.on_end(lease, "expired")
            return
        if self._bus.now_unix_ms() < claimed.record.deadline_unix_ms:
            try:
                if await self._claims.is_last(claimed):
                    self._leases.renew(lease.lease_id, self._bus.times.lease_s, time.monotonic())
                    return
            except BusUnavailable:
                return  # nobody can read the chain now; looked at again with the next beat
        if self._leases.take_off(lease.lease_id):
            self._end(lease, "expired")

    def _end(self, lease: Lease, outcome: str) -> None:
        claimed = self._waiting.pop(lease.lease_id)
        self._engine.release(lease.key)
        self._metrics.leases.set(len(self._leases))
        self._metrics.leases_ended.labels(outcome).inc()
        self._claims.settle(claimed)
