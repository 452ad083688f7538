"""Which cached slot goes first: by recency, by frequency, and by what a lower tier has."""

from __future__ import annotations

from collections.abc import Sequence

from tests.workers.engine.test_block_pool import make_pool
from workers.engine.cached_blocks import CachedBlocks
from workers.kv.api import BlockName


def cached(*blocks: int, reused: tuple[int, ...] = ()) -> CachedBlocks:
    made = CachedBlocks()
    for block in blocks:
        made.add(block, is_reused=block in reused)
    return made


def drain(blocks: CachedBlocks) -> list[int]:
    return [blocks.pop_victim(None) for _ in range(len(blocks))]


def test_what_was_never_used_again_goes_first() -> None:
    """A flood of prompts that nobody asks again leaves alone what is asked again and again."""
    assert drain(cached(1, 2, 3, 4, 5, reused=(1, 3))) == [2, 4, 5, 1, 3]


def test_what_was_popular_once_goes_in_the_end() -> None:
    """Slots that were used again are four fifths at most: beyond that the oldest of them goes."""
    blocks = cached(*range(10), reused=tuple(range(9)))
    assert blocks.pop_victim(None) == 0
    assert blocks.pop_victim(None) == 1
    assert 9 in list(blocks)


def test_a_slot_with_a_copy_below_goes_before_the_oldest_few() -> None:
    """Of the oldest few one that is not lost goes; when there is none, the oldest."""
    assert cached(*range(20)).pop_victim(lambda block: block in (5, 6)) == 5
    assert cached(*range(20)).pop_victim(lambda block: block in (15,)) == 0


def test_a_removed_slot_is_no_victim() -> None:
    """Whoever refers to a slot again takes it out, whichever segment it is in."""
    blocks = cached(1, 2, 3, 4, reused=(2,))
    blocks.remove(2)
    blocks.remove(1)
    assert drain(blocks) == [3, 4]


class Lower:
    """A tier below that has what it is told."""

    def __init__(self) -> None:
        self.demoted: list[tuple[int, BlockName]] = []
        self.kept: set[bytes] = set()

    def demote(self, blocks: Sequence[tuple[int, BlockName]]) -> None:
        self.demoted += blocks

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self.kept


def test_a_pool_demotes_what_becomes_full_and_counts_what_it_loses() -> None:
    """Each block is offered to the lower tier once, by name; an eviction says whether a copy is
    left."""
    pool, _ = make_pool(2)
    lower = Lower()
    pool.lower = lower
    old, new = pool.allocate(2) or []
    pool.register(old, b"old", b"salt")
    pool.register(new, b"new", b"old")
    pool.register(new, b"again", b"old")
    assert lower.demoted == [
        (old, BlockName(block_hash=b"old", parent=b"salt")),
        (new, BlockName(block_hash=b"new", parent=b"old")),
    ]
    pool.release([old])
    pool.release([new])
    lower.kept = {b"new"}
    assert pool.allocate(2) == [new, old]
    assert (pool.tally.count("device", "evicted"), pool.tally.count("device", "dropped")) == (1, 1)
