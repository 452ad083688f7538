"""The books of a disk tier: which blocks it has, and which files there are. Pure.

A file is counted from before it is written until after it is deleted::

    (not there) -> writing -> kept -> going -> (not there)
                       \\-> lost              a failed write whose rest could not be deleted

Only kept blocks can be found. ``going`` is out of the books and still on the disk: being deleted,
or refused by the disk and tried again later. What is read is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.kv.api import BlockEvents, BlockName, EvictionPolicy


class DiskBooks:
    """Not thread-safe.

    Args:
        max_files: the quota, in files of one block each.
        policy: says what goes first; nobody else uses it.
    """

    def __init__(
        self, max_files: int, policy: EvictionPolicy, events: BlockEvents | None = None
    ) -> None:
        self.max_files = max_files
        self._policy = policy
        self._events = events
        self._kept: dict[bytes, BlockName] = {}
        self._reading: dict[bytes, int] = {}  # how many readers
        self._writing: set[bytes] = set()
        self._going: set[bytes] = set()
        self._refused: list[BlockName] = []  # those of ``going`` that the disk did not delete
        self._num_lost = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_files(self) -> int:
        """Files that are there, or may be."""
        return len(self._kept) + len(self._writing) + len(self._going) + self._num_lost

    def has(self, block_hash: bytes) -> bool:
        """Whether a block can be found. Also without the lock."""
        return block_hash in self._kept

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes``, without a gap, can be found. Also without the lock."""
        for position, block_hash in enumerate(hashes):
            if block_hash not in self._kept:
                return position
        return len(hashes)

    def note_use(self, block_hash: bytes) -> None:
        """A use without reading; of a block that can't be found, nothing."""
        self._policy.used(block_hash)

    # ---- reading ---------------------------------------------------------------------------

    def begin_read(self, block_hash: bytes) -> BlockName | None:
        """The block, pinned until ``end_read``; None when it isn't there."""
        block = self._kept.get(block_hash)
        if block is not None:
            self._reading[block_hash] = self._reading.get(block_hash, 0) + 1
            self._policy.used(block_hash)
        return block

    def end_read(self, block_hash: bytes) -> None:
        """Once per ``begin_read`` that found it."""
        self._reading[block_hash] -= 1
        if not self._reading[block_hash]:
            del self._reading[block_hash]

    # ---- writing ---------------------------------------------------------------------------

    def has_room(self, num_files: int) -> bool:
        """Whether the quota has room for so many more."""
        return self.num_files + num_files <= self.max_files

    def begin_write(self, block: BlockName) -> bool:
        """Count a file for ``block`` until ``kept`` or ``not_kept``; False when one is there, or
        the quota has no room: see ``make_room``."""
        name = block.block_hash
        if name in self._kept or name in self._writing or name in self._going:
            return False
        if not self.has_room(1):
            return False
        self._writing.add(name)
        return True

    def kept(self, block: BlockName) -> None:
        """It is written, or was found."""
        self._writing.discard(block.block_hash)
        self._kept[block.block_hash] = block
        self._policy.added(block)
        if self._events is not None:
            self._events.stored("disk", block)

    def not_kept(self, block: BlockName, *, is_lost: bool) -> None:
        """It could not be written; ``is_lost``: what is there of it could not be deleted."""
        self._writing.remove(block.block_hash)
        self._num_lost += is_lost

    # ---- deleting --------------------------------------------------------------------------

    def make_room(self, num_files: int) -> list[BlockName]:
        """What has to be deleted so that ``num_files`` more fit, as far as one cycle goes; it
        can't be found any more. Empty when there is room, or nothing can go."""
        missing = self.num_files + num_files - self.max_files
        if missing <= 0:
            return []
        doomed, self._refused = self._refused, []
        if missing > len(doomed):
            names = self._policy.victims(missing - len(doomed), self._reading.keys())
            doomed += [self._kept[name] for name in names]
            for name in names:
                self._forget(name)
        return doomed

    def drop(self, block: BlockName) -> bool:
        """It is of no use and has to be deleted; False when somebody else does that."""
        if block.block_hash not in self._kept:
            return False
        self._forget(block.block_hash)
        return True

    def deleted(self, block: BlockName, *, is_refused: bool) -> None:
        """Its file is gone, or the disk refused to delete it: the next ``make_room`` asks again."""
        if is_refused:
            self._refused.append(block)
        else:
            self._going.remove(block.block_hash)

    def _forget(self, block_hash: bytes) -> None:
        del self._kept[block_hash]
        self._going.add(block_hash)
        self._policy.removed(block_hash)
        if self._events is not None:
            self._events.removed("disk", block_hash)

    def check_invariants(self) -> None:
        """Raise AssertionError when a file is in no book or in two."""
        kept = self._kept.keys()
        assert not self._writing & self._going, "a file is written and deleted at a time"
        assert not kept & (self._writing | self._going), "a block is kept and on its way"
        assert {block.block_hash for block in self._refused} <= self._going, "refused, not going"
        assert self._num_lost >= 0, "fewer files than none"
        assert min(self._reading.values(), default=1) > 0, "a reader that does not read"
        self._policy.check_invariants()
