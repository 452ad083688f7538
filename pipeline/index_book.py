"""What has been heard of each worker's tiers, and whether that is all. Pure.

    in order            applied to the index as it comes
    a number is missing, said by the next batch or by a heartbeat, or the worker itself says so
                        stale: a snapshot is wanted; batches are kept until it is there
    a snapshot          in place of all that was known of the worker, then what was kept
    an old number       passed over

A stale worker's blocks stay in the index meanwhile: a hint that is wrong costs a look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pipeline.radix_index import RadixIndex
from schemas.errors import SchemaError
from schemas.kv_events import (
    KvEvents,
    KvSnapshotAsk,
    KvSnapshotPart,
    KvTier,
    StoredRun,
    unpack_hashes,
)

MAX_KEPT = 256  # batches of one stale worker; with more a second snapshot is needed

Taken = Literal["done", "more", "later"]
_Run = tuple[KvTier, list[bytes], tuple[KvTier, ...]]  # a tier, what it has, tiers with the same


@dataclass(slots=True)
class _Source:
    """One worker as we know it."""

    seq: int = 0  # all batches up to here are in the index
    newest_seq: int = 0  # that we know of
    is_stale: bool = False
    kept: dict[int, KvEvents] = field(default_factory=dict)
    loading_seq: int = 0  # of the snapshot that comes in
    num_loaded: int = 0  # parts of it


class IndexBook:
    """Feeds an index from events and snapshots.

    Attributes:
        num_changes: blocks that were said to be stored or removed.
        num_gaps: times that something had been missed.
        num_snapshots: that were taken whole.
    """

    def __init__(self, index: RadixIndex) -> None:
        self.num_changes = 0
        self.num_gaps = 0
        self.num_snapshots = 0
        self._index = index
        self._sources: dict[str, _Source] = {}

    @property
    def workers(self) -> list[str]:
        """Who was heard of and not dropped."""
        return list(self._sources)

    def stale(self) -> list[str]:
        """Workers of which a snapshot is wanted."""
        return [worker for worker, source in self._sources.items() if source.is_stale]

    def hear(self, events: KvEvents) -> None:
        """A batch came.

        Raises:
            SchemaError: it can't be read; what it would have said is missing from now on.
        """
        source = self._sources.setdefault(events.worker, _Source())
        source.newest_seq = max(source.newest_seq, events.seq)
        if events.seq <= source.seq:
            return
        if source.is_stale:
            _keep(source, events)
        elif events.seq != source.seq + 1 or events.is_gap:
            self._mark_stale(source)
            _keep(source, events)
        else:
            self._apply(events)
            source.seq = events.seq

    def hear_seq(self, worker: str, seq: int) -> None:
        """A worker says the number of its last batch."""
        source = self._sources.setdefault(worker, _Source())
        source.newest_seq = max(source.newest_seq, seq)
        if seq > source.seq and not source.is_stale:
            self._mark_stale(source)

    def next_ask(self, worker: str) -> KvSnapshotAsk | None:
        """What to ask a stale worker next; None when it is not, or was dropped."""
        source = self._sources.get(worker)
        if source is None or not source.is_stale:
            return None
        return KvSnapshotAsk(worker=worker, part=source.num_loaded, at_least_seq=source.newest_seq)

    def take(self, part: KvSnapshotPart) -> Taken:
        """An answer came; whether there is more to ask for, now or later.

        Raises:
            SchemaError: it can't be read; the snapshot has to be asked for anew.
        """
        source = self._sources.get(part.worker)
        if source is None or not source.is_stale:
            return "done"
        is_next = part.part == source.num_loaded and part.part < part.num_parts
        if not is_next or (part.part and part.seq != source.loading_seq):
            source.num_loaded = 0
            return "later"
        try:
            runs = _unpacked(part.stored)
        except SchemaError:
            source.num_loaded = 0
            raise
        if part.part == 0:
            self._index.drop(part.worker)
            source.loading_seq = part.seq
        self._store(part.worker, runs)
        source.num_loaded += 1
        if source.num_loaded < part.num_parts:
            return "more"
        self._finish(part.worker, source)
        return "later" if source.is_stale else "done"

    def drop(self, worker: str) -> None:
        """It is gone, and all that it held."""
        self._sources.pop(worker, None)
        self._index.drop(worker)

    def _finish(self, worker: str, source: _Source) -> None:
        """A snapshot is in: go on behind it with what was kept."""
        self.num_snapshots += 1
        source.seq, source.num_loaded, source.is_stale = source.loading_seq, 0, False
        kept, source.kept = source.kept, {}
        for seq in sorted(kept):
            self.hear(kept[seq])
        if source.newest_seq > source.seq and not source.is_stale:
            self._mark_stale(source)

    def _mark_stale(self, source: _Source) -> None:
        self.num_gaps += 1
        source.is_stale = True
        source.num_loaded = 0

    def _apply(self, events: KvEvents) -> None:
        stored = _unpacked(events.stored)
        removed = [(one.tier, unpack_hashes(one.hashes), one.also) for one in events.removed]
        for tier, hashes, also in removed:
            self._index.removed(events.worker, tier, hashes, also)
            self.num_changes += len(hashes)
        self._store(events.worker, stored)

    def _store(self, worker: str, runs: list[_Run]) -> None:
        for tier, hashes, also in runs:
            self._index.stored(worker, tier, hashes, also)
            self.num_changes += len(hashes)


def _keep(source: _Source, events: KvEvents) -> None:
    if len(source.kept) >= MAX_KEPT:
        source.kept.clear()
    source.kept[events.seq] = events


def _unpacked(runs: tuple[StoredRun, ...]) -> list[_Run]:
    return [(run.tier, unpack_hashes(run.hashes), run.also) for run in runs]
