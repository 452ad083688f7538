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

from workers.engine.cached_blocks import CachedBlocks
from workers.kv.api import BlockEvents, BlockName
from workers.kv.tally import TierTally

# Blocks that follow each other, their hashes, and the hash before the first (the salt, if none is).
Run = tuple[Sequence[int], Sequence[bytes], bytes]


class Slots(Protocol):
    """The part of :class:`infra.transport.shm.SharedPool` that the books need."""

    num_blocks: int

    def touch(self, slot: int) -> None:
        """Raise the slot's generation."""


class LowerTier(Protocol):
    """Where blocks are kept beside the pool; :class:`workers.kv.mover.BlockMover` is one."""

    def demote(self, blocks: Sequence[tuple[int, BlockName]]) -> None:
        """These, each in its slot, can be found from now on, and may be copied until that slot is
        touched."""

    def holds(self, block_hash: bytes) -> bool:
        """Whether a copy is kept."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Slots by state; they sum to the size of the pool."""

    free: int
    cached: int
    active: int


class BlockPool:
    """Slots with reference counts, and an index of full blocks by prefix hash.

    "No room" is an answer (None), never an exception. Which cached slot is evicted first is told
    by :class:`CachedBlocks`; of one sequence's blocks the last goes first, since an earlier block
    is of use without the later one but not the other way round.

    Args:
        num_blocks: the pool has the first so many of ``slots``; None: all.

    Attributes:
        lower: the tier below, if there is one.
        events: who wants to know what can be found.
        tally: counts what is lost to an eviction.
    """

    def __init__(self, slots: Slots, block_size: int, num_blocks: int | None = None) -> None:
        self.block_size = block_size
        self.num_blocks = slots.num_blocks if num_blocks is None else num_blocks
        self.lower: LowerTier | None = None
        self.events: BlockEvents | None = None
        self.tally = TierTally()
        self._slots = slots
        self._references = [0] * self.num_blocks
        self._is_reused = bytearray(self.num_blocks)
        self._free = list(range(self.num_blocks - 1, -1, -1))  # a stack: warm slots first
        self._cached = CachedBlocks()
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
        num_free = min(count, len(self._free))
        blocks = [self._free.pop() for _ in range(num_free)]
        if num_free < count:
            blocks += self._evict(count - num_free)
        for block in blocks:
            self._references[block] = 1
            self._is_reused[block] = False
            self._slots.touch(block)
        return blocks

    def _evict(self, count: int) -> list[int]:
        is_spare = None if self.lower is None else self._is_spare
        blocks, hashes, num_kept = [], [], 0
        for _ in range(count):
            block = self._cached.pop_victim(is_spare)
            num_kept += is_spare is not None and is_spare(block)
            block_hash = self._hash_of.pop(block)
            del self._block_of[block_hash]
            blocks.append(block)
            hashes.append(block_hash)
        self.tally.add("device", "evicted", num_kept)
        self.tally.add("device", "dropped", count - num_kept)
        if self.events is not None:
            self.events.removed("device", *hashes)
        return blocks

    def _is_spare(self, block: int) -> bool:
        return self.lower is not None and self.lower.holds(self._hash_of[block])

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each block, which must be active or cached."""
        for block in blocks:
            if self._references[block] == 0:
                self._cached.remove(block)
            self._references[block] += 1
            self._is_reused[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Without any, a block with a hash stays cached."""
        for block in reversed(blocks):
            references = self._references[block] - 1
            assert references >= 0, f"block {block} is released more often than taken"
            self._references[block] = references
            if references:
                continue
            if block in self._hash_of:
                self._cached.add(block, is_reused=bool(self._is_reused[block]))
            else:
                self._free.append(block)

    def register(self, block: int, prefix_hash: bytes, parent: bytes = b"") -> None:
        """Make a full, computed block findable; a second block of equal content stays private."""
        self.register_runs([((block,), (prefix_hash,), parent)])

    def register_runs(self, runs: Iterable[Run]) -> None:
        """The same for runs of blocks: what a step has filled, told at once."""
        new: list[tuple[int, BlockName]] = []
        for blocks, prefix_hashes, parent in runs:
            for block, prefix_hash in zip(blocks, prefix_hashes, strict=True):
                if prefix_hash not in self._block_of and block not in self._hash_of:
                    self._block_of[prefix_hash] = block
                    self._hash_of[block] = prefix_hash
                    new.append((block, BlockName(prefix_hash, parent)))
                parent = prefix_hash
        if not new:
            return
        self.tally.add("device", "stored", len(new))
        if self.events is not None:
            self.events.stored("device", *[name for _, name in new])
        if self.lower is not None:
            self.lower.demote(new)

    def find(self, prefix_hash: bytes) -> int | None:
        """The block of that hash, not acquired."""
        return self._block_of.get(prefix_hash)

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
        assert len(cached) == len(self._cached), "a slot is cached twice"
        assert cached <= self._hash_of.keys(), "a cached slot has no hash"
        index = {prefix_hash: block for block, prefix_hash in self._hash_of.items()}
        assert index == self._block_of, "the two hash indexes differ"
