"""Offering computed blocks to decode workers: leases, handles, and how they end.

A held request's blocks stay in the engine while its lease stands. It ends when a reader releases
it, or at its expiry when the request has gone on without it. A request that still waits for its
decode worker gets its lease renewed, until its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from infra.bus import Bus, Msg, TokenWriter, publish_work
from infra.log import Logger
from infra.metrics import Metrics
from infra.transport.handover import checksums
from infra.transport.shm import SharedPool
from schemas import subjects
from schemas.codec import decode, encode, pack_ids, tag_of
from schemas.errors import BusUnavailable, SchemaError
from schemas.headers import WorkHeaders
from schemas.kv import KvHandle, KvReady, LeaseRelease
from workers.claims import Claimed, Claims
from workers.engine.api import HeldRequest
from workers.execution import Execution, Running
from workers.kv.leases import Lease, LeaseBook

INLINE_RECORD_BYTES = 64 * 1024  # longer ones are read from mesh.v1.request.<id>
_FLUSH_S = 2.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What a handle says of the pool behind it."""

    memory: SharedPool
    fingerprint: str
    addresses: tuple[str, ...]


class Offers:
    """The handles that one worker id gives out.

    Args:
        leases: of this process: its pool's door asks the same book.
        on_end: called whenever a lease ended: blocks are free again.
    """

    def __init__(
        self,
        bus: Bus,
        claims: Claims,
        writer: TokenWriter,
        pool: PoolFacts,
        leases: LeaseBook,
        metrics: Metrics,
        log: Logger,
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._writer = writer
        self._pool = pool
        self._leases = leases
        self._metrics = metrics
        self._log = log
        self._on_end = on_end
        self._waiting: dict[str, Claimed] = {}  # by lease: not known to be read yet
        self._execution: Execution | None = None

    @property
    def num_waiting(self) -> int:
        """Leases that stand."""
        return len(self._waiting)

    def waiting(self) -> list[Claimed]:
        """The requests behind them."""
        return list(self._waiting.values())

    def attach(self, execution: Execution) -> None:
        """The execution whose held requests are offered."""
        self._execution = execution

    def offer(self, running: Running, held: HeldRequest) -> None:
        """Give a lease on a held request's blocks and announce it."""
        lease = self._leases.give(held.key, self._bus.times.lease_s, time.monotonic())
        self._waiting[lease.lease_id] = running.claimed
        self._metrics.leases.set(len(self._leases))
        self._the_execution.spawn(self._announce(running, held, lease), f"offer {held.key}")

    async def run(self) -> None:
        """Hear releases and look after expiries, until cancelled."""
        subscription = await self._bus.subscribe(
            subjects.lease(self._claims.worker), self._hear_release
        )
        try:
            while True:
                await asyncio.sleep(self._bus.times.beat_s)
                for lease in self._leases.expired(time.monotonic()):
                    await self._settle_expired(lease)
        finally:
            await subscription.unsubscribe()

    def end_all(self) -> None:
        """Take every lease back: this worker id is given up."""
        for lease in self._leases.take_all():
            self._end(lease, "expired")

    @property
    def _the_execution(self) -> Execution:
        assert self._execution is not None, "attach comes first"
        return self._execution

    async def _announce(self, running: Running, held: HeldRequest, lease: Lease) -> None:
        """The tokens confirmed, then KvReady; through outages, until the deadline."""
        claimed = running.claimed
        record = claimed.record
        handle = await self._handle(held, lease)
        ready = KvReady(
            request_id=record.request_id,
            epoch=claimed.epoch,
            after_seq=claimed.seq,
            reader=claimed.reader,
            worker=self._claims.worker,
            handle=handle,
            tokens=tuple(pack_ids(run) for run in running.tokens),
            finished=tuple(running.finished),
            num_cached_tokens=held.num_cached_tokens,
            record=record if len(record.prompt_ids) <= INLINE_RECORD_BYTES else None,
        )
        headers = WorkHeaders(
            schema=tag_of(KvReady),
            request_id=record.request_id,
            epoch=claimed.epoch,
            deadline_unix_ms=record.deadline_unix_ms,
            traceparent=claimed.traceparent,
        )
        msg_id = f"{record.request_id}.kv-ready.{claimed.epoch}"
        while self._bus.now_unix_ms() < record.deadline_unix_ms:
            try:
                await self._writer.flush(_FLUSH_S)
                await self._the_execution.trace.mark(record.request_id, "kv_ready_published")
                subject = subjects.kv_ready(record.served)
                await publish_work(self._bus, subject, encode(ready), headers, msg_id=msg_id)
            except BusUnavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            return
        self._take_back(lease)

    async def _handle(self, held: HeldRequest, lease: Lease) -> KvHandle:
        memory, blocks = self._pool.memory, list(held.blocks)
        return KvHandle(
            lease_id=lease.lease_id,
            secret=lease.secret,
            owner=self._claims.worker,
            fingerprint=self._pool.fingerprint,
            num_tokens=held.num_tokens,
            blocks=pack_ids(blocks),
            generations=pack_ids(memory.generations[blocks].tolist()),
            checksums=await asyncio.to_thread(checksums, memory, blocks),
            addresses=self._pool.addresses,
            expires_unix_ms=self._bus.now_unix_ms() + int(self._bus.times.lease_s * 1000),
        )

    def _hear_release(self, message: Msg) -> None:
        try:
            release = decode(message.data, LeaseRelease)
        except SchemaError as error:
            self._log.warning("lease_message_refused", reason=error.message)
            return
        lease = self._leases.release(release.lease_id, release.secret)
        if lease is not None:
            self._end(lease, "released")

    async def _settle_expired(self, lease: Lease) -> None:
        claimed = self._waiting.get(lease.lease_id)
        if claimed is not None and self._bus.now_unix_ms() < claimed.record.deadline_unix_ms:
            try:
                if await self._claims.still_ours(claimed):
                    times = self._bus.times
                    self._leases.renew(lease.lease_id, times.lease_s, time.monotonic())
                    return
            except BusUnavailable:
                return  # nobody can read the chain now; looked at again with the next beat
        self._take_back(lease)

    def _take_back(self, lease: Lease) -> None:
        if self._leases.take_off(lease.lease_id):
            self._end(lease, "expired")

    def _end(self, lease: Lease, outcome: str) -> None:
        self._waiting.pop(lease.lease_id, None)
        self._the_execution.release(lease.key)
        self._metrics.leases.set(len(self._leases))
        self._metrics.leases_ended.labels(outcome).inc()
        self._on_end()
