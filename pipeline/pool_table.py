"""The workers of one served model as columns, so that all of them are weighed at once.

One row per live worker, in no order; a worker that leaves hands its row to the last one. Rows are
written when something is heard of a worker, and read once per decision: a decision among 256
workers is a few array operations instead of thousands of attribute reads.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.control import Beat
from schemas.profiles import StepCosts

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

_FIRST_SIZE = 16
_COLUMNS: Final = (
    "heard_s",  # when its last beat was heard
    "wait_ms",  # what a prompt that came at ``wait_s`` would wait; goes down by itself
    "wait_s",
    "waiting",  # sequences that wait at ``wait_s``
    "waiting_tokens",  # of their prompts, not computed yet
    "running",
    "since",  # sequences placed there that no beat has told of
    "slots",  # free ones, less those placed since
    "used",  # share of its KV blocks that can't be had, 0 to 1
    "has_costs",
    "prefill_base_ms",
    "prefill_token_ms",
    "prefill_square_ms",
    "kv_token_bytes",
    "block_size",
)
ROLES: Final = ("prefill", "decode", "suffix")


class PoolTable:
    """Columns are read as attributes of :attr:`columns`, a dict of arrays of ``num_rows``."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.beats: list[Beat] = []
        self.version = 0  # of who is there and what they can do
        self._row: dict[str, int] = {}
        self._data = np.zeros((len(_COLUMNS), _FIRST_SIZE))
        self._rows_of: dict[str, Rows] = {}

    @property
    def num_rows(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    def column(self, name: str) -> Floats:
        """[num_rows], a view: it tells what is known now."""
        return self._data[_INDEX[name], : len(self.workers)]

    def row(self, worker: str) -> int | None:
        """Where ``worker`` stands; None when it is not here."""
        return self._row.get(worker)

    def rows_of(self, role: str) -> Rows:
        """The rows of those that have ``role``, by worker id; the same object until somebody comes
        or goes."""
        found = self._rows_of.get(role)
        if found is None:
            rows = [row for row, beat in enumerate(self.beats) if role in beat.roles]
            rows.sort(key=self.workers.__getitem__)
            found = self._rows_of[role] = np.array(rows, dtype=np.intp)
        return found

    def put(self, beat: Beat, now_s: float) -> int:
        """Take a worker's beat; its row."""
        row = self._row.get(beat.worker)
        if row is None:
            row = self._add(beat)
        elif self.beats[row].roles != beat.roles:
            self._changed()
        self.beats[row] = beat
        self._data[:, row] = _facts(beat, now_s)
        return row

    def add(self, name: str, row: int, amount: float) -> None:
        """Change one cell by ``amount``."""
        self._data[_INDEX[name], row] += amount

    def set(self, name: str, row: int, value: float) -> None:
        """Change one cell."""
        self._data[_INDEX[name], row] = value

    def drop(self, worker: str) -> None:
        """It is gone."""
        row = self._row.pop(worker, None)
        if row is None:
            return
        last = len(self.workers) - 1
        if row != last:
            self.workers[row], self.beats[row] = self.workers[last], self.beats[last]
            self._data[:, row] = self._data[:, last]
            self._row[self.workers[row]] = row
        del self.workers[last], self.beats[last]
        self._changed()

    def _add(self, beat: Beat) -> int:
        row = len(self.workers)
        if row == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
        self.workers.append(beat.worker)
        self.beats.append(beat)
        self._row[beat.worker] = row
        self._changed()
        return row

    def _changed(self) -> None:
        self.version += 1
        self._rows_of.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError when rows and names don't belong together."""
        assert len(self.workers) == len(self.beats) == len(self._row), "a row too many"
        for worker, row in self._row.items():
            assert self.workers[row] == self.beats[row].worker == worker, "two workers in one row"


_INDEX: Final = {name: number for number, name in enumerate(_COLUMNS)}
_NO_COSTS = StepCosts(
    prefill_base_ms=0,
    prefill_token_ms=0,
    prefill_square_ms=0,
    decode_base_ms=0,
    decode_context_ms=0,
    decode_sequence_ms=0,
)


def _facts(beat: Beat, now_s: float) -> tuple[float, ...]:
    """One row, in the order of ``_COLUMNS``."""
    load, costs = beat.load, beat.costs or _NO_COSTS
    return (
        now_s,
        load.waiting_ms,
        now_s,
        load.num_waiting,
        load.waiting_tokens,
        load.num_running,
        0.0,
        load.num_free_slots,
        _used(beat),
        beat.costs is not None,
        costs.prefill_base_ms,
        costs.prefill_token_ms,
        costs.prefill_square_ms,
        beat.kv_token_bytes,
        beat.block_size,
    )


def _used(beat: Beat) -> float:
    """How full a worker is: of its blocks or its slots, whichever is scarcer."""
    load = beat.load
    blocks = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
    num_slots = load.num_running + load.num_waiting + load.num_free_slots
    slots = 1 - load.num_free_slots / num_slots if num_slots else 0.0
    return min(max(blocks, slots, 0.0), 1.0)
