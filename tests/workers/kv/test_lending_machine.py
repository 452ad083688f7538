"""Lender and reader, with everything that can go wrong between them, in any order.

Both sides are the real ones, books and all; the bus is a table of callbacks that loses what it is
told to lose, and the bytes are copied by a reader that fails when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from infra.metrics import Metrics
from infra.times import Times
from infra.transport.shm import SharedPool
from schemas import subjects
from schemas.codec import decode, unpack_ids
from schemas.errors import BusUnavailable, KvLost
from schemas.kv import KvHandle, KvLent, LeaseRelease
from tests.workers.kv.fakes import BLOCK_BYTES, bytes_of, chain_of, checksum_of
from workers.kv.api import BlockName
from workers.kv.borrowing import BusLenders
from workers.kv.fetching import Fetching, NotFetched
from workers.kv.handles import PoolFacts
from workers.kv.host_tier import HostPool
from workers.kv.leases import Lease, LeaseBook
from workers.kv.lending import Lending, LentTier

NUM_SLOTS = 12
PROMPTS = [chain_of(6, first) for first in range(4)]
LOSSES = ("nothing", "question", "answer", "release")
READS = ("right", "wrong", "fails", "is cancelled")


class Message:
    def __init__(self, data: bytes, reply: str = "") -> None:
        self.data, self.reply = data, reply


class LoopBus:
    """What both sides need of a bus. ``lost`` names what does not arrive."""

    times = Times()

    def __init__(self) -> None:
        self.heard: dict[str, Callable[[Any], None]] = {}
        self.answers: dict[str, asyncio.Future[Message]] = {}
        self.lost = "nothing"
        self.handles: list[KvHandle] = []  # of all answers that were given

    def now_unix_ms(self) -> int:
        return 0

    async def subscribe(self, subject: str, callback: Callable[[Any], None]) -> LoopBus:
        self.heard[subject] = callback
        return self

    async def unsubscribe(self) -> None:
        self.heard.clear()

    async def request(self, subject: str, data: bytes, timeout_s: float) -> Message:
        if self.lost == "question" or subject not in self.heard:
            raise BusUnavailable("no answer")
        reply = f"reply.{len(self.answers)}"
        answer = self.answers[reply] = asyncio.get_running_loop().create_future()
        self.heard[subject](Message(data, reply))
        message = await answer
        if self.lost == "answer":
            raise BusUnavailable("no answer")
        return message

    async def publish(self, subject: str, data: bytes) -> None:
        if subject in self.answers:
            lent = decode(data, KvLent)
            if lent.handle is not None:
                self.handles.append(lent.handle)
            self.answers[subject].set_result(Message(data))
        elif self.lost != "release" and subject in self.heard:
            self.heard[subject](Message(data))


class Reader:
    """Copies out of the owner's memory, as it is told to."""

    def __init__(self, source: SharedPool, may_read: Callable[[str, bytes], bool]) -> None:
        self.source, self.may_read = source, may_read
        self.how = "right"
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def read(
        self, handle: KvHandle, into: SharedPool, slots: Sequence[int], deadline_s: float
    ) -> None:
        self.has_begun.set()
        if self.how == "is cancelled":
            assert self.may_end.wait(60)
        assert self.may_read(handle.lease_id, handle.secret), "read without a lease"
        rows = unpack_ids(handle.blocks)
        for row, slot in zip(rows, slots, strict=True):
            into.slots[slot] = self.source.slots[row]
        if self.how == "fails":
            raise KvLost("the owner is gone")
        if self.how == "wrong":
            raise KvLost("another checksum")


class LenderAndReader(RuleBasedStateMachine):
    """One owner, one reader, prompts that share nothing."""

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.bus = LoopBus()
        self.book = LeaseBook()
        self.tiers = [HostPool(SharedPool(NUM_SLOTS + 1, BLOCK_BYTES), 1) for _ in range(2)]
        self.owner, self.reader = self.tiers
        log, bus = structlog.get_logger("test"), self.bus
        facts = PoolFacts(memory=self.owner.memory, fingerprint="test", addresses=())
        tier = LentTier(host=self.owner, num_slots=NUM_SLOTS, block_size=4)
        self.lending = Lending(bus, "owner", tier, facts, self.book, Metrics(), log)  # type: ignore[arg-type]
        self.lenders = BusLenders(bus, "reader", "test", log)  # type: ignore[arg-type]
        self.reads = Reader(self.owner.memory, self.book.may_read)
        self.fetching = Fetching(self.reader, self.reads, "test")
        self.bus.heard[subjects.lease("owner")] = self.hear_release
        self.listening = self.runner.get_loop().create_task(self.lending.run())
        self.ended: list[str] = []
        self.runner.run(asyncio.sleep(0))

    def hear_release(self, message: Message) -> None:
        word = decode(message.data, LeaseRelease)
        if (lease := self.book.release(word.lease_id, word.secret)) is not None:
            self.end(lease, "released")

    def end(self, lease: Lease, outcome: str) -> None:
        self.ended.append(lease.lease_id)
        lease.on_end(lease, outcome)

    @rule(prompt=st.sampled_from(PROMPTS), count=st.integers(1, 6))
    def compute(self, prompt: list[BlockName], count: int) -> None:
        filling = self.owner.reserve(prompt[:count])
        for block, slot in zip(filling.blocks, filling.slots, strict=True):
            self.owner.memory.slots[slot] = memoryview(bytes_of(block))
        self.owner.commit(filling, [checksum_of(block) for block in filling.blocks])

    @rule(
        prompt=st.sampled_from(PROMPTS),
        first=st.integers(0, 5),
        lost=st.sampled_from(LOSSES),
        how=st.sampled_from(READS),
    )
    def fetch(self, prompt: list[BlockName], first: int, lost: str, how: str) -> None:
        self.bus.lost, self.reads.how = lost, how
        self.reads.has_begun.clear()
        self.reads.may_end.clear()
        self.runner.run(self._fetch(prompt[first:]))
        self.bus.lost = "nothing"

    async def _fetch(self, blocks: list[BlockName]) -> None:
        ends_s = asyncio.get_running_loop().time() + 60
        with contextlib.suppress(NotFetched):
            if self.reads.how != "is cancelled":
                await self.fetching.fetch("owner", blocks, ends_s, self.lenders)
                return
            async with asyncio.TaskGroup() as tasks:
                fetch = self.fetching.fetch("owner", blocks, ends_s, self.lenders)
                task = tasks.create_task(self._quiet(fetch))
                while not task.done() and not self.reads.has_begun.is_set():
                    await asyncio.sleep(0)
                task.cancel()
        self.reads.may_end.set()
        while self.reader.counts().filling:
            await asyncio.sleep(0)

    async def _quiet(self, work: Any) -> None:
        with contextlib.suppress(NotFetched):
            await work

    @rule(blocks=st.sampled_from(PROMPTS), number=st.integers(0, 5))
    def lose(self, blocks: list[BlockName], number: int) -> None:
        self.owner.discard(blocks[number].block_hash)

    @rule()
    def expire(self) -> None:
        for lease in self.book.expired(float("inf")):
            assert self.book.take_off(lease.lease_id) is lease
            self.end(lease, "expired")

    @rule(knows_secret=st.booleans())
    def repeat_a_release(self, knows_secret: bool) -> None:
        for handle in self.bus.handles:
            secret = handle.secret if knows_secret else b"guessed"
            lease = self.book.release(handle.lease_id, secret)
            if lease is not None:
                assert knows_secret
                self.end(lease, "released")

    @invariant()
    def books_are_right(self) -> None:
        for tier in self.tiers:
            tier.check_invariants()
        self.lending.check_invariants()
        self.book.check_invariants()
        assert len(self.book) == self.lending.num_lent
        assert len(self.ended) == len(set(self.ended)), "a lease ended twice"
        counts = self.reader.counts()
        assert counts.filling == counts.pinned == 0, "the reader holds something"
        assert bool(self.owner.counts().pinned) == bool(self.lending.num_lent)

    @invariant()
    def what_the_reader_found_is_right(self) -> None:
        for prompt in PROMPTS:
            for block in prompt:
                pin = self.reader.pin([block.block_hash])
                for slot, total in zip(pin.slots, pin.checksums, strict=True):
                    assert bytes(self.reader.memory.slots[slot]) == bytes_of(block)
                    assert total == xxhash.xxh3_64_intdigest(bytes_of(block))
                self.reader.unpin(pin)

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        self.expire()
        assert self.owner.counts().pinned == 0, "a pin outlives all leases"
        self.listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.runner.run(self._ended())
        self.fetching.close()
        self.runner.close()
        for tier in self.tiers:
            tier.memory.close()

    async def _ended(self) -> None:
        await self.listening


TestLenderAndReader = LenderAndReader.TestCase
TestLenderAndReader.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
