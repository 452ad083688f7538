"""What a simulated worker says of the blocks it holds: the events of the real one, by pieces."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.simulate.events import EventQueue
from loadgen.simulate.prompts import piece_hashes
from schemas.kv_events import KvEvents, RemovedBlocks, StoredRun

_NO_PARENT = b""  # whoever looks prompts up by chained hashes has no use for it


class KvLog:
    """Gathers changes for a while, then tells them as one numbered batch.

    Args:
        gather_s: from the first change on.
        tell: takes the batches.
    """

    def __init__(
        self, worker: str, gather_s: float, queue: EventQueue, tell: Callable[[KvEvents], None]
    ) -> None:
        self.seq = 0
        self._worker = worker
        self._gather_s = gather_s
        self._queue = queue
        self._tell = tell
        self._told: dict[bytes, int] = {}  # blocks of a piece, as the batches so far say
        self._held: dict[bytes, int] = {}  # of those that have changed since
        self._parents: dict[bytes, bytes] = {}  # of those that were stored since

    def stored(self, name: bytes, parent: bytes, num_blocks: int) -> None:
        """A piece can be found."""
        self._note(name, num_blocks)
        self._parents[name] = parent

    def removed(self, name: bytes, num_blocks: int) -> None:
        """None of its blocks can be found any more."""
        self._note(name, 0)

    def _note(self, name: bytes, num_blocks: int) -> None:
        if not self._held:
            self._queue.after(self._gather_s, self._flush)
        self._held[name] = num_blocks

    def _flush(self) -> None:
        held, self._held = self._held, {}
        parents, self._parents = self._parents, {}
        stored: list[bytearray] = []
        removed: list[bytes] = []
        last = None
        for name, num_blocks in held.items():
            told = self._told.get(name, 0)
            if num_blocks > told:
                self._told[name] = num_blocks
                if not stored or parents[name] != last:
                    stored.append(bytearray())
                stored[-1] += piece_hashes(name, num_blocks)
                last = name
            elif told and not num_blocks:
                del self._told[name]
                removed.append(piece_hashes(name, told))
        if not stored and not removed:
            return  # what came has gone again
        self.seq += 1
        runs = (StoredRun(tier="device", parent=_NO_PARENT, hashes=bytes(run)) for run in stored)
        gone = (RemovedBlocks(tier="device", hashes=b"".join(removed)),) if removed else ()
        self._tell(KvEvents(worker=self._worker, seq=self.seq, stored=tuple(runs), removed=gone))
