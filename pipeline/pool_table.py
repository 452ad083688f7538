"""The workers of one served model as columns, so that all of them are weighed at once.

One row per live worker: first those that prefill, then by roles, then by worker id. So those of
one role are mostly a slice of the table, which is weighed where it lies. Rows are written when
something is heard of a worker, and read once per decision: a decision among 256 workers is a few
array operations instead of thousands of attribute reads.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pipeline.cost_model import FREE
from pipeline.prefix_walk import Roll
from schemas.control import Beat

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]

RECENT_S = 10.0
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
    "decode_base_ms",
    "decode_context_ms",
    "decode_sequence_ms",
    "context_tokens",
    "free_tokens",  # of its KV cache, less those of decodes placed since
    "since_tokens",  # of decodes placed since
    "num_since",  # of those
    "since_prompts",  # tokens of prompts placed since
    "layout",  # see layout_of
    "prompts",  # that it has, or will have, for another worker to decode
    "prompt_tokens",  # of all of them, computed or not
    "link_s",  # when the KV will have come that is on its way there
    "recent_ms",  # work that was placed there lately, as it counted at ``recent_s``; see `recent`
    "recent_s",
)
_KEPT: Final = 5  # the last columns outlive a beat
ROLES: Final = ("prefill", "decode", "suffix")


class Columns:
    """Some workers' figures, [num_columns, num_rows]: copied, or the table's own as they are."""

    __slots__ = ("_data",)

    def __init__(self, data: Floats) -> None:
        self._data = data

    def __getitem__(self, name: str) -> Floats:
        return self._data[_INDEX[name]]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return int(self._data.shape[1])

    def wait_ms(self, now_s: float) -> Floats:
        """How long a prompt would wait that came now."""
        passed_ms = now_s - self["wait_s"]
        np.maximum(0.0, passed_ms, out=passed_ms)
        passed_ms *= 1000
        left_ms = self["wait_ms"] - passed_ms
        return np.maximum(0.0, left_ms, out=left_ms)

    def link_ms(self, now_s: float) -> Floats:
        """How long the way to each is taken by the KV of those placed before."""
        left_ms = np.maximum(0.0, self["link_s"] - now_s)
        left_ms *= 1000
        return left_ms

    def recent(self, now_s: float) -> Floats:
        """The work that was placed there lately, fading over ``RECENT_S``."""
        age_s = self["recent_s"] - now_s  # the other way round
        np.minimum(0.0, age_s, out=age_s)
        age_s /= RECENT_S
        np.exp(age_s, age_s)
        age_s *= self["recent_ms"]
        return age_s

    def compute_ms(self, num_prompt: int, cached: Floats | float) -> Floats:
        """The prefill of a prompt of which ``cached`` tokens are there, by each one's costs."""
        total_ms = self["prefill_token_ms"] * (num_prompt - cached)
        total_ms += self["prefill_base_ms"]
        total_ms += self["prefill_square_ms"] * (num_prompt * num_prompt - cached * cached)
        return total_ms

    def step_ms(self) -> Floats:
        """A decode step of what runs there, those placed since the last beat included."""
        total_ms = self["context_tokens"] + self["since_tokens"]
        total_ms *= self["decode_context_ms"]
        total_ms += self["decode_base_ms"]
        total_ms += self["decode_sequence_ms"] * (self["running"] + self["num_since"])
        return total_ms


class PoolTable:
    """Live workers by row; what is known of them by column."""

    def __init__(self) -> None:
        self.workers: list[str] = []
        self.beats: list[Beat] = []
        self.version = 0  # of who is there and what they can do
        self._row: dict[str, int] = {}
        self._order: list[_Rank] = []
        self._data = np.zeros((len(_COLUMNS), _FIRST_SIZE))
        self._rows_of: dict[str, Rows] = {}
        self._where: dict[str, slice | Rows] = {}
        self._places: tuple[Roll, Rows] | None = None
        self._all_have_costs: bool | None = None
        self._layouts: dict[str, int] = {}

    @property
    def num_rows(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    def column(self, name: str) -> Floats:
        """[num_rows], a view: it tells what is known now."""
        return self._data[_INDEX[name], : len(self.workers)]

    def take(self, rows: Rows | slice) -> Columns:
        """All columns of some rows. A slice of them is not copied: it changes with the table."""
        if isinstance(rows, slice):
            return Columns(self._data[:, rows])
        return Columns(self._data.take(rows, axis=1))

    def row(self, worker: str) -> int | None:
        """Where ``worker`` stands; None when it is not here."""
        return self._row.get(worker)

    def find_rows(self, workers: Sequence[str]) -> Rows | None:
        """Where each of ``workers`` stands; None when one is not here."""
        try:
            return np.fromiter(map(self._row.__getitem__, workers), np.intp, len(workers))
        except KeyError:
            return None

    def heard_s(self, row: int) -> float:
        """When one row's last beat was heard."""
        return self._data.item(_HEARD_S, row)

    def wait_ms(self, row: int, now_s: float) -> float:
        """How long a prompt would wait in one row that came now."""
        left_ms = self._data.item(_WAIT_MS, row)
        passed_ms = 1000 * (now_s - self._data.item(_WAIT_S, row))
        if passed_ms > 0:
            left_ms -= passed_ms
        return left_ms if left_ms > 0 else 0.0

    def way_ms(self, row: int, now_s: float) -> float:
        """How long the way to one row is taken by KV that was sent there."""
        return max(0.0, 1000 * (self._data.item(_LINK_S, row) - now_s))

    def decodes_since(self, row: int) -> tuple[float, float]:
        """How many decodes were placed with one row that no beat has told of, and their tokens."""
        return self._data.item(_NUM_SINCE, row), self._data.item(_SINCE_TOKENS, row)

    def num_prompts_since(self, row: int) -> float:
        """How many prompts."""
        return self._data.item(_SINCE, row) - self._data.item(_NUM_SINCE, row)

    def rows_of(self, role: str) -> Rows:
        """The rows of those that have ``role``, by worker id; the same object until somebody comes
        or goes."""
        found = self._rows_of.get(role)
        if found is None:
            rows = [row for row, beat in enumerate(self.beats) if role in beat.roles]
            rows.sort(key=self.workers.__getitem__)
            found = self._rows_of[role] = np.array(rows, dtype=np.intp)
        return found

    def where(self, role: str) -> slice | Rows:
        """The same as a slice, if they lie one behind the other."""
        found = self._where.get(role)
        if found is None:
            rows = found = self.rows_of(role)
            if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
                found = slice(int(rows[0]), int(rows[0]) + len(rows))
            self._where[role] = found
        return found

    def places(self, roll: Roll) -> Rows:
        """[num_rows]: the place of each one in ``roll``; -1: it has none."""
        if self._places is None or self._places[0] is not roll:
            places = [roll.places.get(worker, -1) for worker in self.workers]
            self._places = (roll, np.array(places, dtype=np.intp))
        return self._places[1]

    @property
    def all_have_costs(self) -> bool:
        """Whether each one says what its steps cost."""
        if self._all_have_costs is None:
            self._all_have_costs = bool(self.column("has_costs").all())
        return self._all_have_costs

    def put(self, beat: Beat, now_s: float) -> int:
        """Take a worker's beat; its row."""
        row = self._row.get(beat.worker)
        if row is None:
            row = self._add(beat, np.zeros(len(_COLUMNS)))
        elif self.beats[row].roles != beat.roles:
            known = self._data[:, row].copy()
            self.drop(beat.worker)
            row = self._add(beat, known)
        if self._data.item(_HAS_COSTS, row) != (beat.costs is not None):
            self._all_have_costs = None
        self.beats[row] = beat
        self._data[:-_KEPT, row] = (*_facts(beat, now_s), self.layout_of(beat.fingerprint))
        return row

    def layout_of(self, fingerprint: str) -> int:
        """What the column ``layout`` says of workers with this fingerprint."""
        return self._layouts.setdefault(fingerprint, len(self._layouts))

    def add(self, name: str, row: int, amount: float) -> None:
        """Change one cell by ``amount``."""
        place = _INDEX[name]
        self._data[place, row] = self._data.item(place, row) + amount

    def set(self, name: str, row: int, value: float) -> None:
        """Change one cell."""
        self._data[_INDEX[name], row] = value

    def note_work(self, row: int, ms: float, now_s: float) -> None:
        """So much was placed there now."""
        data = self._data
        passed_s = max(0.0, now_s - data.item(_RECENT_S, row))
        kept_ms = data.item(_RECENT_MS, row) * math.exp(-passed_s / RECENT_S)
        data[_RECENT_MS, row] = kept_ms + ms
        data[_RECENT_S, row] = now_s

    def note_prompt(self, row: int, num: int, num_tokens: int) -> None:
        """So many prompts more are to be handed over by one row."""
        self.add("prompts", row, num)
        self.add("prompt_tokens", row, num_tokens)

    def note_link(self, worker: str, there_s: float) -> None:
        """Until then the way to ``worker`` is taken."""
        row = self._row.get(worker)
        if row is not None:
            self.set("link_s", row, max(there_s, self._data.item(_LINK_S, row)))

    def drop(self, worker: str) -> None:
        """It is gone."""
        row = self._row.get(worker)
        if row is None:
            return
        num = self.num_rows
        self._data[:, row : num - 1] = self._data[:, row + 1 : num]
        del self.workers[row], self.beats[row], self._order[row]
        self._changed()

    def _add(self, beat: Beat, figures: Floats) -> int:
        rank, num = _rank(beat), self.num_rows
        if num == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
        row = bisect_left(self._order, rank)
        self._data[:, row + 1 : num + 1] = self._data[:, row:num]
        self._data[:, row] = figures
        self.workers.insert(row, beat.worker)
        self.beats.insert(row, beat)
        self._order.insert(row, rank)
        self._changed()
        return row

    def _changed(self) -> None:
        self.version += 1
        self._row = {worker: row for row, worker in enumerate(self.workers)}
        self._rows_of.clear()
        self._where.clear()
        self._places = None
        self._all_have_costs = None

    def check_invariants(self) -> None:
        """Raise AssertionError when rows and names don't belong together."""
        assert len(self.workers) == len(self.beats) == len(self._row), "a row too many"
        assert self._order == sorted(map(_rank, self.beats)), "a row in the wrong place"
        for worker, row in self._row.items():
            assert self.workers[row] == self.beats[row].worker == worker, "two workers in one row"


_INDEX: Final = {name: number for number, name in enumerate(_COLUMNS)}
_HAS_COSTS: Final = _INDEX["has_costs"]
_HEARD_S: Final = _INDEX["heard_s"]
_LINK_S: Final = _INDEX["link_s"]
_NUM_SINCE: Final = _INDEX["num_since"]
_RECENT_MS: Final = _INDEX["recent_ms"]
_RECENT_S: Final = _INDEX["recent_s"]
_SINCE: Final = _INDEX["since"]
_SINCE_TOKENS: Final = _INDEX["since_tokens"]
_WAIT_MS: Final = _INDEX["wait_ms"]
_WAIT_S: Final = _INDEX["wait_s"]


_Rank = tuple[bool, tuple[str, ...], str]


def _rank(beat: Beat) -> _Rank:
    return "prefill" not in beat.roles, beat.roles, beat.worker


def _facts(beat: Beat, now_s: float) -> tuple[float, ...]:
    """One row but its layout, in the order of ``_COLUMNS``."""
    load, costs = beat.load, beat.costs or FREE
    return (
        now_s,
        load.waiting_ms,
        now_s - load.age_ms / 1000,
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
        costs.decode_base_ms,
        costs.decode_context_ms,
        costs.decode_sequence_ms,
        load.context_tokens,
        load.num_free_blocks * beat.block_size,
        0.0,
        0.0,
        0.0,
    )


def _used(beat: Beat) -> float:
    """How full a worker is: of its blocks or its slots, whichever is scarcer."""
    load = beat.load
    blocks = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
    num_slots = load.num_running + load.num_waiting + load.num_free_slots
    slots = 1 - load.num_free_slots / num_slots if num_slots else 0.0
    return min(max(blocks, slots, 0.0), 1.0)
