"""What a simulated worker says of the blocks it holds: the events of the real one, by pieces."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.simulate.events import EventQueue
from loadgen.simulate.prompts import piece_hashes
from schemas.kv_events import KvEvents, KvTier, RemovedBlocks, StoredRun

_NO_PARENT = b""  # whoever looks prompts up by chained hashes has no use for it


Piece = tuple[KvTier, bytes]  # a tier, and the name of a piece


class KvLog:
    """Gathers changes of all tiers for a while, then tells them as one numbered batch.

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
        self._told: dict[Piece, int] = {}  # blocks of a piece, as the batches so far say
        self._held: dict[Piece, int] = {}  # of those that have changed since
        self._parents: dict[Piece, bytes] = {}  # of those that were stored since

    def stored(self, tier: KvTier, name: bytes, parent: bytes, num_blocks: int) -> None:
        """A piece can be found."""
        self._note((tier, name), num_blocks)
        self._parents[tier, name] = parent

    def removed(self, tier: KvTier, name: bytes, num_blocks: int) -> None:
        """None of its blocks can be found any more."""
        self._note((tier, name), 0)

    def _note(self, piece: Piece, num_blocks: int) -> None:
        if not self._held:
            self._queue.after(self._gather_s, self._flush)
        self._held[piece] = num_blocks

    def _flush(self) -> None:
        held, self._held = self._held, {}
        parents, self._parents = self._parents, {}
        runs: list[tuple[KvTier, bytearray]] = []
        removed: dict[KvTier, bytearray] = {}
        last: Piece | None = None
        for piece, num_blocks in held.items():
            (tier, name), told = piece, self._told.get(piece, 0)
            if num_blocks > told:
                self._told[piece] = num_blocks
                if last != (tier, parents[piece]):
                    runs.append((tier, bytearray()))
                runs[-1][1].extend(piece_hashes(name, num_blocks))
                last = piece
            elif told and not num_blocks:
                del self._told[piece]
                removed.setdefault(tier, bytearray()).extend(piece_hashes(name, told))
        if runs or removed:  # else what came has gone again
            self._say(runs, removed)

    def _say(self, runs: list[tuple[KvTier, bytearray]], removed: dict[KvTier, bytearray]) -> None:
        self.seq += 1
        stored = (StoredRun(tier=tier, parent=_NO_PARENT, hashes=bytes(run)) for tier, run in runs)
        gone = (RemovedBlocks(tier=tier, hashes=bytes(one)) for tier, one in removed.items())
        events = KvEvents(
            worker=self._worker, seq=self.seq, stored=tuple(stored), removed=tuple(gone)
        )
        self._tell(events)
