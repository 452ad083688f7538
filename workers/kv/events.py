"""What this process's tiers hold, noted where it happens, told in batches.

    engine's thread, tiers' threads    note(tier, block)        a lock, a table, nothing else
    event loop                         cut()                    what differs since the last cut
                                       cut_whole()              and all that is held, at one instant

A block that came and went between two cuts has not changed. When more has changed than a batch
should carry, the cut says so ("gap") in place of the changes; what is held stays exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from schemas.kv_events import HASH_BYTES, KvTier, RemovedBlocks, StoredRun
from workers.kv.api import BlockName

MAX_CHANGES = 8_192  # blocks per cut: 128 KiB of hashes, and a millisecond under the lock
_TIERS: tuple[KvTier, ...] = ("device", "host", "disk")
_BIT: dict[KvTier, int] = {tier: 1 << number for number, tier in enumerate(_TIERS)}
_PIECE_BYTES = 96  # of a run or a list of removed blocks, without its hashes

T = TypeVar("T")

# A block, its parent, and a bit for each tier as it was at the cut before and as it is now.
_Change = tuple[bytes, bytes | None, int, int]


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
        self._tiers: dict[bytes, int] = {}  # a bit for each tier
        self._parents: dict[bytes, bytes] = {}
        self._was: dict[bytes, int] = {}  # the bits at the last cut, of what was noted since
        self._is_gap = False

    def __len__(self) -> int:
        return len(self._tiers)

    def stored(self, tier: KvTier, *blocks: BlockName) -> None:
        """See :class:`workers.kv.api.BlockEvents`."""
        bit = _BIT[tier]
        with self._lock:
            for block in blocks:
                block_hash = block.block_hash
                bits = self._tiers.get(block_hash, 0)
                if not bits & bit:
                    self._parents[block_hash] = block.parent
                    self._set(block_hash, bits, bits | bit)

    def removed(self, tier: KvTier, *hashes: bytes) -> None:
        """See :class:`workers.kv.api.BlockEvents`."""
        bit = _BIT[tier]
        with self._lock:
            for block_hash in hashes:
                bits = self._tiers.get(block_hash, 0)
                self._set(block_hash, bits, bits & ~bit)

    def _set(self, block_hash: bytes, was: int, now: int) -> None:
        if was == now:
            return
        if now:
            self._tiers[block_hash] = now
        else:
            del self._tiers[block_hash], self._parents[block_hash]
        is_first = not self._was and not self._is_gap
        if not self._is_gap and block_hash not in self._was:
            self._was[block_hash] = was
            if len(self._was) > self._max_changes:
                self._was.clear()
                self._is_gap = True
        if is_first and self.on_change is not None:
            self.on_change()

    def held(self) -> dict[bytes, tuple[KvTier, ...]]:
        """Every block with its tiers, now."""
        with self._lock:
            tiers = dict(self._tiers)
        return {one: _tiers_of(bits) for one, bits in tiers.items()}

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
            tiers, parents = self._tiers.copy(), self._parents.copy()
        held = ((one, parents[one], 0, bits) for one, bits in tiers.items())
        return changes(), lambda: _told(held).stored

    def _cut(self) -> Callable[[], Changes]:
        """Under the lock only what must be of one instant; the rest is done by the caller."""
        was, self._was = self._was, {}
        is_gap, self._is_gap = self._is_gap, False
        parents = list(map(self._parents.get, was))
        now = [bits or 0 for bits in map(self._tiers.get, was)]
        changes = zip(was, parents, was.values(), now, strict=True)
        return lambda: _told(changes, is_gap=is_gap)


def _told(changes: Iterable[_Change], *, is_gap: bool = False) -> Changes:
    """What came into the same tiers is one fact, and so is what left the same ones."""
    stored: dict[int, list[_Run]] = {}
    removed: dict[int, bytearray] = {}
    for block_hash, parent, was, now in changes:
        if came := now & ~was:
            _add(stored.setdefault(came, []), block_hash, parent or b"")
        if left := was & ~now:
            removed.setdefault(left, bytearray()).extend(block_hash)
    return Changes(
        stored=tuple(
            StoredRun(tier=tiers[0], parent=run.parent, hashes=bytes(run.hashes), also=tiers[1:])
            for tiers, runs in _by_tiers(stored)
            for run in runs
        ),
        removed=tuple(
            RemovedBlocks(tier=tiers[0], hashes=bytes(hashes), also=tiers[1:])
            for tiers, hashes in _by_tiers(removed)
        ),
        is_gap=is_gap,
    )


def _by_tiers(found: Mapping[int, T]) -> Iterable[tuple[tuple[KvTier, ...], T]]:
    return ((_tiers_of(bits), found[bits]) for bits in sorted(found))


def _tiers_of(bits: int) -> tuple[KvTier, ...]:
    return tuple(tier for tier in _TIERS if bits & _BIT[tier])


class _Run:
    __slots__ = ("hashes", "last", "parent")

    def __init__(self, block_hash: bytes, parent: bytes) -> None:
        self.parent = parent
        self.hashes = bytearray(block_hash)
        self.last = block_hash


def _add(runs: list[_Run], block_hash: bytes, parent: bytes) -> None:
    """To the run that it continues, if that is the last one, else as a new one."""
    if runs and runs[-1].last == parent:
        runs[-1].hashes += block_hash
        runs[-1].last = block_hash
    else:
        runs.append(_Run(block_hash, parent))


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
