"""A simulated worker's host memory: pieces of prompts that were computed there, or came there.

As in ``workers/kv``, it has a copy of whatever can be found on the device as soon as that is full,
and so is of use as far as it is larger. Here what was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class HostTier:
    """Copies of pieces, by their names.

    Args:
        num_blocks: 0: there is none.
        on_stored, on_removed: as of :class:`loadgen.simulate.extents.ExtentPool`.
    """

    def __init__(
        self,
        num_blocks: int,
        blocks_per_piece: int,
        on_stored: Callable[[bytes, bytes, int], None],
        on_removed: Callable[[bytes, int], None],
    ) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self._blocks_per_piece = blocks_per_piece
        self._on_stored = on_stored
        self._on_removed = on_removed
        self._pieces: OrderedDict[bytes, int] = OrderedDict()  # used longest ago first

    def copy(self, name: bytes, parent: bytes, num_blocks: int) -> None:
        """The first ``num_blocks`` of a piece can be found on the device."""
        known = self._pieces.pop(name, 0)
        self.num_used -= known
        kept = max(known, num_blocks)
        if kept > self.num_blocks:
            return
        while self.num_used + kept > self.num_blocks:
            oldest, blocks = self._pieces.popitem(last=False)
            self.num_used -= blocks
            self._on_removed(oldest, blocks)
        self._pieces[name] = kept
        self.num_used += kept
        if kept > known:
            self._on_stored(name, parent, kept)

    def copy_all(self, names: Sequence[bytes], num_blocks: int) -> None:
        """The first ``num_blocks`` of a prompt came here from another worker."""
        parent = b""
        for place, name in enumerate(names):
            blocks = min(self._blocks_per_piece, num_blocks - place * self._blocks_per_piece)
            if blocks <= 0:
                return
            self.copy(name, parent, blocks)
            parent = name

    def num_found(self, names: Sequence[bytes], most: int) -> int:
        """How many of a prompt's first ``most`` blocks are here."""
        found = 0
        for name in names:
            blocks = self._pieces.get(name, 0)
            found += blocks
            if found >= most or blocks < self._blocks_per_piece:
                break
        return min(found, most)

    def touch(self, names: Sequence[bytes]) -> None:
        """These are of use; of a prompt the last goes first."""
        for name in reversed(names):
            if name in self._pieces:
                self._pieces.move_to_end(name)

    def check_invariants(self) -> None:
        """Raise AssertionError when blocks are counted wrong."""
        assert self.num_used == sum(self._pieces.values()) <= self.num_blocks, "counted wrong"
