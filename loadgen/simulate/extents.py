"""A worker's KV pool, by extents: blocks of one piece of a prompt, kept and dropped together.

What a trace shares, it shares by pieces of 512 tokens. So the books are kept by pieces: the pool of
the engine (``workers/engine/block_pool.py``) with 32 blocks where that has one. Its rules are the
same: what nobody refers to stays findable until the room is wanted, victims are chosen by the
engine's own :class:`CachedBlocks`, of one prompt the last piece goes first, and a second copy of
what is known already stays private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from workers.engine.cached_blocks import CachedBlocks


@dataclass(slots=True, eq=False)
class Extent:
    """Blocks from the beginning of one piece."""

    number: int
    name: bytes
    num_blocks: int
    references: int = 0
    is_reused: bool = False


def _nobody(*_: object) -> None:
    """Nobody wants to know."""


class ExtentPool:
    """Blocks that are free, findable or in use.

    Args:
        blocks_per_piece: a piece that has fewer here is the end of what can be found.

    Attributes:
        on_stored: told of a piece's name, of the one before it, and how many of its blocks can be
            found now.
        on_removed: told of a piece, and how many of its blocks can't be found any more.
    """

    def __init__(self, num_blocks: int, blocks_per_piece: int) -> None:
        self.num_blocks = num_blocks
        self.blocks_per_piece = blocks_per_piece
        self.on_stored: Callable[[bytes, bytes, int], None] = _nobody
        self.on_removed: Callable[[bytes, int], None] = _nobody
        self._free = num_blocks
        self._num_cached = 0  # blocks of extents that nobody refers to
        self._by_name: dict[bytes, Extent] = {}
        self._by_number: dict[int, Extent] = {}
        self._cached = CachedBlocks()
        self._num_made = 0

    @property
    def num_available(self) -> int:
        """How many blocks ``allocate`` could give out now."""
        return self._free + self._num_cached

    @property
    def num_findable(self) -> int:
        """Blocks that can be found by the name of their piece."""
        return sum(extent.num_blocks for extent in self._by_name.values())

    def allocate(self, count: int) -> bool:
        """Take ``count`` blocks for new content; False, and nothing taken, without room."""
        if count > self.num_available:
            return False
        while self._free < count:
            self._evict()
        self._free -= count
        return True

    def free(self, count: int) -> None:
        """Give back private blocks."""
        self._free += count

    def find(self, name: bytes) -> Extent | None:
        """The extent of that name, not acquired."""
        return self._by_name.get(name)

    def num_found(self, names: Sequence[bytes], most: int) -> int:
        """How many of a prompt's first ``most`` blocks can be found."""
        found = 0
        for name in names:
            extent = self._by_name.get(name)
            if extent is None or found >= most:
                break
            found += extent.num_blocks
            if extent.num_blocks < self.blocks_per_piece:
                break
        return min(found, most)

    def take(self, names: Sequence[bytes], most: int) -> tuple[list[Extent], int]:
        """Refer to the longest known beginning of a prompt; how many blocks of it, at most
        ``most``, are of use."""
        taken: list[Extent] = []
        found = 0
        for name in names:
            extent = self._by_name.get(name)
            if extent is None or found >= most:
                break
            self._acquire(extent)
            taken.append(extent)
            found += extent.num_blocks
            if extent.num_blocks < self.blocks_per_piece:
                break
        return taken, min(found, most)

    def register(self, name: bytes, parent: bytes, num_blocks: int) -> tuple[Extent | None, int]:
        """Private blocks are the beginning of a piece that follows ``parent``: make them findable.

        Returns:
            The extent, now also the caller's, and how many private blocks went into it; None, where
            as much of the piece is known already.
        """
        extent = self._by_name.get(name)
        if extent is not None and extent.num_blocks >= num_blocks:
            return None, 0
        if extent is None:
            self._num_made += 1
            extent = Extent(self._num_made, name, 0)
            self._by_name[name] = self._by_number[extent.number] = extent
            extent.references = 1
        else:
            self._acquire(extent)
        return extent, self.grow(extent, parent, num_blocks)

    def grow(self, extent: Extent, parent: bytes, num_blocks: int) -> int:
        """Private blocks of somebody who refers to ``extent`` make it longer; how many."""
        moved = num_blocks - extent.num_blocks
        if moved <= 0:
            return 0
        extent.num_blocks = num_blocks
        self.on_stored(extent.name, parent, num_blocks)
        return moved

    def release(self, extents: Iterable[Extent]) -> None:
        """One reference less to each, those at the end of the prompt first."""
        for extent in reversed(list(extents)):
            extent.references -= 1
            assert extent.references >= 0, "an extent is released more often than taken"
            if extent.references == 0:
                self._num_cached += extent.num_blocks
                self._cached.add(extent.number, is_reused=extent.is_reused)

    def clear(self) -> None:
        """Nothing can be found any more; only where nothing is in use."""
        while self._num_cached:
            self._evict()

    def _acquire(self, extent: Extent) -> None:
        if extent.references == 0:
            self._cached.remove(extent.number)
            self._num_cached -= extent.num_blocks
        extent.references += 1
        extent.is_reused = True

    def _evict(self) -> None:
        extent = self._by_number.pop(self._cached.pop_victim(None))
        del self._by_name[extent.name]
        self._num_cached -= extent.num_blocks
        self._free += extent.num_blocks
        self.on_removed(extent.name, extent.num_blocks)

    def check_invariants(self, num_private: int) -> None:
        """Raise AssertionError when blocks are lost or counted twice.

        Args:
            num_private: blocks that sequences have for themselves.
        """
        shared = sum(extent.num_blocks for extent in self._by_name.values())
        assert self._free + shared + num_private == self.num_blocks, "a block is lost"
        assert self._free >= 0, "more was given out than there is"
        idle = [extent for extent in self._by_name.values() if extent.references == 0]
        assert sum(extent.num_blocks for extent in idle) == self._num_cached, "counted wrong"
        assert {extent.number for extent in idle} == set(self._cached), "in use and cached"
        assert len(self._by_name) == len(self._by_number), "the two tables differ"
