"""Lending: other workers read prefixes that we have.

Consumes   mesh.v1.kv-lend.<worker>     KvLend
Publishes  the reply subject            KvLent: a handle with its lease, or none
Keeps      pins in the host tier, one per lease, until the reader is done or the lease is over
Twice?     another lease on the same blocks
Fails      a question nobody can read is not answered; what is over a bound is answered with none

Blocks that only the disk has come to the host tier first, while the reader waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from infra.bus import Bus, Msg
from infra.log import Logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.prefix_hash import HASH_BYTES
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import MeshError, SchemaError
from schemas.kv import KvHandle, KvLend, KvLent
from workers.kv.api import BlockName, HostTier, Pin
from workers.kv.handles import PoolFacts, pack_checksums
from workers.kv.leases import Lease, LeaseBook

MAX_LEASES = 64
MAX_PERIODS = 30  # of a lease, however often its reader extends it
MAX_OPEN = 16  # questions in work; more are answered with none
MAX_SHARE = 0.5  # of the host tier's slots: the rest is for our own requests

Load = Callable[[Sequence[BlockName], float], Awaitable[int]]
"""Bring blocks from disk to the host tier, as far as the disk has them, in so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LentTier:
    """What is lent out of: a host tier of ``num_slots`` blocks of ``block_size`` tokens, and a
    disk from which ``load`` brings blocks to it, if there is one."""

    host: HostTier
    num_slots: int
    block_size: int
    load: Load | None = None


class Lending:
    """The loans of one worker id.

    Args:
        leases: of this process: its pool's door asks the same book. Who reads it ends the leases
            there; a loan is over when its lease is.
    """

    def __init__(
        self,
        bus: Bus,
        worker: str,
        tier: LentTier,
        pool: PoolFacts,
        leases: LeaseBook,
        metrics: Metrics,
        log: Logger,
    ) -> None:
        self._bus = bus
        self._worker = worker
        self._tier = tier
        self._pool = pool
        self._leases = leases
        self._metrics = metrics
        self._log = log
        self._pins: dict[str, Pin] = {}  # by lease
        self._num_blocks = 0  # lent, or being looked for
        self._num_open = 0
        self._numbers = itertools.count()
        self._is_closed = False
        self._returned = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def num_lent(self) -> int:
        """Loans that stand."""
        return len(self._pins)

    async def run(self) -> None:
        """Answer until cancelled."""
        async with task_scope() as self._tasks:
            subject = subjects.kv_lend(self._worker)
            subscription = await self._bus.subscribe(subject, self._take)
            try:
                await asyncio.Event().wait()
            finally:
                await subscription.unsubscribe()

    async def leave(self) -> None:
        """Lend nothing more, and wait until all that was lent is read, or its lease is over."""
        self._is_closed = True
        while self._pins:
            self._returned.clear()
            await self._returned.wait()

    def _take(self, message: Msg) -> None:
        assert self._tasks is not None, "it listens while it runs"
        try:
            question = decode(message.data, KvLend)
        except SchemaError as error:
            self._log.warning("lend_refused", reason=error.message)
            return
        self._tasks.create_task(self._handle(message, question), name=f"lend {question.reader}")

    async def _handle(self, message: Msg, question: KvLend) -> None:
        lent = self._why_not(question)
        if lent is None:
            self._num_open += 1
            try:
                lent = await self._lend(question)
            finally:
                self._num_open -= 1
        self._metrics.kv_lends.labels(lent.reason or "lent").inc()
        try:
            await self._bus.publish(message.reply, encode(lent))
        except MeshError as error:
            self._log.info("lend_not_answered", reader=question.reader, reason=error.message)
            self._take_back(lent)

    def _why_not(self, question: KvLend) -> KvLent | None:
        if self._is_closed:
            return KvLent(num_blocks=0, reason="leaving")
        if question.fingerprint != self._pool.fingerprint:
            return KvLent(num_blocks=0, reason="other_layout")
        if self._num_open >= MAX_OPEN or self.num_lent + self._num_open >= MAX_LEASES:
            return KvLent(num_blocks=0, reason="busy")
        return None

    async def _lend(self, question: KvLend) -> KvLent:
        room = int(MAX_SHARE * self._tier.num_slots) - self._num_blocks
        blocks = _blocks(question)[: max(0, room)]
        if not blocks:
            return KvLent(num_blocks=0, reason="busy")
        self._num_blocks += len(blocks)  # nobody else is given the same room meanwhile
        pin = None
        try:
            pin = await self._pin(blocks, question)
        finally:
            self._num_blocks -= len(blocks)
            if pin is not None:
                self._num_blocks += len(pin.slots)
        if not pin.slots:
            self._tier.host.unpin(pin)
            return KvLent(num_blocks=0, reason="absent")
        return KvLent(num_blocks=len(pin.slots), handle=self._handle_of(pin))

    async def _pin(self, blocks: Sequence[BlockName], question: KvLend) -> Pin:
        hashes = [block.block_hash for block in blocks]
        num_here = self._tier.host.num_leading(hashes)
        left_s = (question.deadline_unix_ms - self._bus.now_unix_ms()) / 1000
        if num_here < len(hashes) and left_s > 0 and self._tier.load is not None:
            await self._tier.load(blocks[num_here:], left_s / 2)  # the other half is for reading
        return self._tier.host.pin(hashes)

    def _handle_of(self, pin: Pin) -> KvHandle:
        key = f"loan {next(self._numbers)}"
        now_s, lease_s = time.monotonic(), self._bus.times.lease_s
        lease = self._leases.give(
            key, lease_s, now_s, now_s + MAX_PERIODS * lease_s, on_end=self._end
        )
        self._pins[lease.lease_id] = pin
        self._tell()
        num_tokens = len(pin.slots) * self._tier.block_size
        checksums = pack_checksums(pin.checksums)
        return self._pool.handle(self._bus, self._worker, lease, pin.slots, num_tokens, checksums)

    def _take_back(self, lent: KvLent) -> None:
        if lent.handle is not None and (lease := self._leases.take_off(lent.handle.lease_id)):
            self._end(lease, "dropped")

    def _end(self, lease: Lease, outcome: str) -> None:
        """The lease is over, however it ended."""
        pin = self._pins.pop(lease.lease_id)
        self._num_blocks -= len(pin.slots)
        self._tier.host.unpin(pin)
        self._metrics.leases_ended.labels(outcome).inc()
        self._tell()
        self._returned.set()

    def _tell(self) -> None:
        self._metrics.leases.set(len(self._leases))
        self._metrics.kv_lent_blocks.set(self._num_blocks)

    def check_invariants(self) -> None:
        """Raise AssertionError when a pin has no lease, or blocks are counted wrongly."""
        for lease_id in self._pins:
            assert self._leases.stands(lease_id), f"the pin of lease {lease_id} leaked"
        if not self._num_open:
            num_pinned = sum(len(pin.slots) for pin in self._pins.values())
            assert self._num_blocks == num_pinned, "blocks count as lent that are not"


def _blocks(question: KvLend) -> list[BlockName]:
    data, size = question.hashes, HASH_BYTES
    hashes = [data[start : start + size] for start in range(0, len(data) - size + 1, size)]
    parents = [question.parent, *hashes]
    return [
        BlockName(block_hash=own, parent=parent)
        for own, parent in zip(hashes, parents, strict=False)
    ]
