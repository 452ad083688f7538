"""The books of a KV pool: which slot is free, cached or in use, and which blocks are equal.

A slot is in exactly one state::

    free    nothing of use in it
    cached  nobody refers to it, but its hash is known: it can be used again, or evicted
    active  one or more references: block tables, reservations, held requests (a pin is a reference)

Bytes are not touched here. A slot that is given out for new content gets a new generation first,
so that a reader in another process who still copies the old content notices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Slots(Protocol):
    """The part of :class:`infra.transport.shm.SharedPool` that the books need."""

    num_blocks: int

    def touch(self, slot: int) -> None:
        """Raise the slot's generation."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Slots by state; they sum to the size of the pool."""

    free: int
    cached: int
    active: int


class BlockPool:
    """Slots with reference counts, and an index of full blocks by prefix hash.

    "No room" is an answer (None), never an exception. Cached slots are evicted least recently used
    first; of one sequence's blocks the last goes first, since an earlier block is of use without
    the later one but not the other way round.
    """

    def __init__(self, slots: Slots, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = slots.num_blocks
        self._slots = slots
        self._references = [0] * slots.num_blocks
        self._free = list(range(slots.num_blocks - 1, -1, -1))  # a stack: warm slots first
        self._cached: dict[int, None] = {}  # oldest first: a dict keeps the order of insertion
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """How many slots ``allocate`` could give out now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """Slots by state."""
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, cached, self.num_blocks - free - cached)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` slots for new content, each with one reference; all of them, or None."""
        if count > self.num_available:
            return None
        return [self._allocate_one() for _ in range(count)]

    def _allocate_one(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._block_of[self._hash_of.pop(block)]
        self._references[block] = 1
        self._slots.touch(block)
        return block

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, which must be active or cached."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Without any, a block with a hash stays cached."""
        for block in reversed(blocks):
            references = self._references[block] - 1
            assert references >= 0, f"block {block} is released more often than taken"
            self._references[block] = references
            if references:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, prefix_hash: bytes) -> None:
        """Make a full, computed block findable; a second block of equal content stays private."""
        if prefix_hash not in self._block_of and block not in self._hash_of:
            self._block_of[prefix_hash] = block
            self._hash_of[block] = prefix_hash

    def match(self, prefix_hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix, not yet acquired."""
        blocks: list[int] = []
        for prefix_hash in prefix_hashes:
            block = self._block_of.get(prefix_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_references(self, block: int) -> int:
        """How many hold this block."""
        return self._references[block]

    def check_invariants(self) -> None:
        """Raise AssertionError when the states overlap, leave a slot out, or contradict hashes."""
        free, cached = set(self._free), set(self._cached)
        active = {block for block, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & cached, "a slot is free and cached"
        assert not active & (free | cached), "a slot in use is free or cached"
        assert len(free) + len(cached) + len(active) == self.num_blocks, "a slot is lost"
        assert min(self._references, default=0) >= 0, "a negative reference count"
        assert not free & self._hash_of.keys(), "a free slot has a hash"
        assert cached <= self._hash_of.keys(), "a cached slot has no hash"
        index = {prefix_hash: block for block, prefix_hash in self._hash_of.items()}
        assert index == self._block_of, "the two hash indexes differ"
