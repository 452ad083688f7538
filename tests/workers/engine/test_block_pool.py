from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.engine.block_pool import BlockCounts, BlockPool


class CountedSlots:
    """Slots that count how often each changed hands."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.generations = [0] * num_blocks

    def touch(self, slot: int) -> None:
        self.generations[slot] += 1


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, CountedSlots]:
    slots = CountedSlots(num_blocks)
    return BlockPool(slots, block_size=4), slots


def test_no_room_is_an_answer() -> None:
    """Allocation is all or nothing: too much gives None and takes nothing."""
    pool, _ = make_pool(4)
    assert pool.allocate(3) is not None
    assert pool.allocate(2) is None
    assert pool.counts() == BlockCounts(free=1, cached=0, active=3)


def test_released_block_with_hash_is_found_again() -> None:
    """A full block outlives its owner in the cache, and its generation stays while it does."""
    pool, slots = make_pool()
    [block] = pool.allocate(1) or []
    pool.register(block, b"hash")
    pool.release([block])
    assert pool.counts() == BlockCounts(free=3, cached=1, active=0)
    assert pool.match([b"hash", b"other"]) == [block]
    pool.acquire([block])
    assert pool.counts().active == 1
    assert slots.generations[block] == 1


def test_least_recently_used_is_evicted_first() -> None:
    """When no slot is free, the cached block that was released longest ago makes room; its hash is
    forgotten and its generation raised."""
    pool, slots = make_pool(2)
    old, new = pool.allocate(2) or []
    pool.register(old, b"old")
    pool.register(new, b"new")
    pool.release([old])
    pool.release([new])
    assert pool.allocate(1) == [old]
    assert slots.generations[old] == 2
    assert pool.match([b"old"]) == []
    assert pool.match([b"new"]) == [new]


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    """Of blocks released together the last goes first: a prefix is of use without its end."""
    pool, _ = make_pool(3)
    blocks = pool.allocate(3) or []
    for block in blocks:
        pool.register(block, b"%d" % block)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[2]]


def test_pinned_block_is_never_evicted() -> None:
    """A reference of any kind keeps a block, however long ago it was used."""
    pool, _ = make_pool(2)
    [block] = pool.allocate(1) or []
    pool.register(block, b"hash")
    pool.acquire([block])
    pool.release([block])
    assert pool.allocate(2) is None
    assert pool.match([b"hash"]) == [block]


def test_second_block_of_equal_content_stays_private() -> None:
    """One hash leads to one block: the first that was registered."""
    pool, _ = make_pool()
    first, second = pool.allocate(2) or []
    pool.register(first, b"hash")
    pool.register(second, b"hash")
    pool.release([first, second])
    assert pool.counts() == BlockCounts(free=3, cached=1, active=0)


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, against a plain count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.slots = make_pool(6)
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what each registered slot holds

    @rule(count=st.integers(0, 7))
    def allocate(self, count: int) -> None:
        room = self.pool.num_available
        before = list(self.slots.generations)
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > room)
        changed = Counter(
            b for b, (x, y) in enumerate(zip(before, self.slots.generations, strict=True)) if x != y
        )
        assert changed == Counter(blocks or [])
        for block in blocks or []:
            self.content.pop(block, None)
        if blocks:
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 5))
    def register(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        prefix_hash = b"%d" % name
        is_new = block not in self.content and prefix_hash not in self.content.values()
        self.pool.register(block, prefix_hash)
        if is_new:
            self.content[block] = prefix_hash

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(name=st.integers(0, 5))
    def reuse(self, name: int) -> None:
        blocks = self.pool.match([b"%d" % name])
        assert blocks == [b for b, content in self.content.items() if content == b"%d" % name]
        if blocks:
            self.pool.acquire(blocks)
            self.held.append(blocks)

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check_invariants()
        references = Counter(block for blocks in self.held for block in blocks)
        for block in range(6):
            assert self.pool.num_references(block) == references[block]
        counts = self.pool.counts()
        assert counts.active == len(references)
        assert counts.free + counts.cached + counts.active == 6


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
