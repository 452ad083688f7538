"""What this process's tiers hold, noted where it happens, told in batches.

    engine's thread, tiers' threads    stored(), removed()      a lock and a list, however many
    event loop                         cut()                    what differs since the last cut
                                       cut_whole()              and all that is held, at one instant

A note waits in a list until somebody wants to know what all come to, and enters them into the
tables in one go: whoever computes spends a third of the time that it would take there and then.

A block that came and went between two cuts has not changed. When more has changed than a batch
should carry, the cut says so ("gap") in place of the changes; what is held stays exact.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from schemas.kv_events import HASH_BYTES, KvTier, RemovedBlocks, StoredRun
from workers.kv.api import BlockName

MAX_CHANGES = 8_192  # blocks per cut: 128 KiB of hashes, and a millisecond under the lock
_TIERS: tuple[KvTier, ...] = ("device", "host", "disk")
_NOWHERE = (0, b"")
_BIT: dict[KvTier, int] = {tier: 1 << number for number, tier in enumerate(_TIERS)}
_MAX_NOTED = 1024  # blocks: entered in 0.3 ms, by whoever notes one more
_PIECE_BYTES = 96  # of a run or a list of removed blocks, without its hashes

T = TypeVar("T")

# The bit of a tier, what came into it, and the hashes of what left it.
_Note = tuple[int, tuple[BlockName, ...], tuple[bytes, ...]]
# A block, a bit for each tier as it was at the cut before and as it is now, and its parent.
_Change = tuple[bytes, int, int, bytes]
# A parent, and the hashes of blocks each of which follows on the one before it.
_Run = list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What has changed between two cuts. ``is_gap``: more than is listed."""

    stored: tuple[StoredRun, ...] = ()
    removed: tuple[RemovedBlocks, ...] = ()
    is_gap: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.is_gap)


class BlockLog:
    """The ``BlockEvents`` of one process: the truth about its tiers, and what is untold of it.

    Attributes:
        on_change: called, from any thread, when there is something to tell after a cut.
    """

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self.on_change: Callable[[], None] | None = None
        self._max_changes = max_changes
        self._lock = threading.Lock()
        self._noted: list[_Note] = []  # what the tables don't know yet
        self._num_noted = 0  # blocks in it
        self._is_cut = True  # and nothing noted since
        self._held: dict[bytes, tuple[int, bytes]] = {}  # a bit for each tier, and the parent
        self._was: dict[bytes, int] = {}  # the bits at the last cut, of what has changed since
        self._is_gap = False

    def __len__(self) -> int:
        with self._lock:
            self._enter()
            return len(self._held)

    def stored(self, tier: KvTier, *blocks: BlockName) -> None:
        """See :class:`workers.kv.api.BlockEvents`."""
        self._note(_BIT[tier], blocks, ())

    def removed(self, tier: KvTier, *hashes: bytes) -> None:
        """See :class:`workers.kv.api.BlockEvents`."""
        self._note(_BIT[tier], (), hashes)

    def _note(self, bit: int, came: tuple[BlockName, ...], went: tuple[bytes, ...]) -> None:
        with self._lock:
            self._noted.append((bit, came, went))
            self._num_noted += len(came) + len(went)
            if self._num_noted > _MAX_NOTED:
                self._enter()
            is_first, self._is_cut = self._is_cut, False
            if is_first and self.on_change is not None:
                self.on_change()

    def _enter(self) -> None:
        """Bring what is noted into the tables; under the lock."""
        held, was = self._held, self._was
        for bit, came, went in self._noted:
            for block in came:
                block_hash = block.block_hash
                bits, parent = held.get(block_hash, _NOWHERE)
                if not bits & bit:
                    was.setdefault(block_hash, bits)
                    held[block_hash] = bits | bit, block.parent
            for block_hash in went:
                bits, parent = held.get(block_hash, _NOWHERE)
                if bits & bit:
                    was.setdefault(block_hash, bits)
                    if bits == bit:
                        del held[block_hash]
                    else:
                        held[block_hash] = bits & ~bit, parent
        self._noted.clear()
        self._num_noted = 0
        if self._is_gap or len(was) > self._max_changes:
            was.clear()
            self._is_gap = True

    def held(self) -> dict[bytes, tuple[KvTier, ...]]:
        """Every block with its tiers, now."""
        with self._lock:
            self._enter()
            held = self._held.copy()
        return {one: _tiers_of(bits) for one, (bits, _) in held.items()}

    def cut(self) -> Changes:
        """What has changed since the last cut."""
        with self._lock:
            changes = self._cut()
        return changes()

    def cut_whole(self) -> tuple[Changes, Callable[[], tuple[StoredRun, ...]]]:
        """The same, and what is held after it. That is taken now, but put into runs only when it
        is called for, which takes a while and may be done on any thread."""
        with self._lock:
            changes = self._cut()
            held = self._held.copy()
        whole = ((one, 0, *now) for one, now in held.items())
        return changes(), lambda: _told(whole).stored

    def _cut(self) -> Callable[[], Changes]:
        """Under the lock only what must be of one instant; the rest is done by the caller."""
        self._enter()
        self._is_cut = True
        was, self._was = self._was, {}
        is_gap, self._is_gap = self._is_gap, False
        held = self._held
        changes = [(one, bits, *held.get(one, _NOWHERE)) for one, bits in was.items()]
        return lambda: _told(changes, is_gap=is_gap)


def _told(changes: Iterable[_Change], *, is_gap: bool = False) -> Changes:
    """What came into the same tiers is one fact, and so is what left the same ones."""
    stored: defaultdict[int, list[_Run]] = defaultdict(list)
    removed: defaultdict[int, list[bytes]] = defaultdict(list)
    for block_hash, was, now, parent in changes:
        if came := now & ~was:
            runs = stored[came]
            if runs and runs[-1][-1] == parent:
                runs[-1].append(block_hash)
            else:
                runs.append([parent, block_hash])
        if left := was & ~now:
            removed[left].append(block_hash)
    return Changes(
        stored=tuple(
            StoredRun(tier=tiers[0], parent=parent, hashes=b"".join(hashes), also=tiers[1:])
            for tiers, runs in _by_tiers(stored)
            for parent, *hashes in runs
        ),
        removed=tuple(
            RemovedBlocks(tier=tiers[0], hashes=b"".join(hashes), also=tiers[1:])
            for tiers, hashes in _by_tiers(removed)
        ),
        is_gap=is_gap,
    )


def _by_tiers(found: Mapping[int, T]) -> Iterable[tuple[tuple[KvTier, ...], T]]:
    return ((_tiers_of(bits), found[bits]) for bits in sorted(found))


def _tiers_of(bits: int) -> tuple[KvTier, ...]:
    return tuple(tier for tier in _TIERS if bits & _BIT[tier])


def in_batches(changes: Changes, max_bytes: int) -> list[Changes]:
    """The same changes in pieces, none of which is over ``max_bytes`` when it is packed.

    Raises:
        ValueError: not even one hash fits.
    """
    if max_bytes < _PIECE_BYTES + HASH_BYTES:
        raise ValueError(f"{max_bytes} bytes are too few for a hash")
    batches: list[Changes] = []
    stored: list[StoredRun] = []
    removed: list[RemovedBlocks] = []
    num_bytes = 0
    for piece in _pieces(changes, max_bytes - _PIECE_BYTES):
        size = _PIECE_BYTES + len(piece.hashes)
        if num_bytes + size > max_bytes:
            batches.append(Changes(stored=tuple(stored), removed=tuple(removed)))
            stored, removed, num_bytes = [], [], 0
        num_bytes += size
        if isinstance(piece, StoredRun):
            stored.append(piece)
        else:
            removed.append(piece)
    if stored or removed or changes.is_gap:
        batches.append(Changes(stored=tuple(stored), removed=tuple(removed), is_gap=changes.is_gap))
    return batches


def _pieces(changes: Changes, max_bytes: int) -> Iterable[StoredRun | RemovedBlocks]:
    step = max_bytes - max_bytes % HASH_BYTES
    for blocks in changes.removed:
        for at in range(0, len(blocks.hashes), step):
            yield RemovedBlocks(
                tier=blocks.tier, hashes=blocks.hashes[at : at + step], also=blocks.also
            )
    for run in changes.stored:
        for at in range(0, len(run.hashes), step):
            parent = run.hashes[at - HASH_BYTES : at] if at else run.parent
            yield StoredRun(
                tier=run.tier, parent=parent, hashes=run.hashes[at : at + step], also=run.also
            )
