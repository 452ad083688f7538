"""Candidates for one request as columns, from what is known of workers. Pure.

Where every candidate's costs are known, times are predicted: a prompt waits for what is before it,
then for the part of it that must be computed or fetched, whichever is sooner. Where one's are not,
all are compared by sequences, 256 prompt tokens counting as one:

    wait        sequences there, and their prompt tokens that wait
    work        minus what it holds of this prompt, at most four sequences' worth: so a worker that
                holds the prompt is preferred until it has four more to do than another
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.outlook import Outlook
from pipeline.pool_table import Columns, Floats, PoolTable, Rows
from pipeline.prefix_walk import Found
from pipeline.scoring import Candidates
from pipeline.topology import Distances

DISK_SHARE = 0.5  # of the worth of a block in memory
TOKENS_PER_SEQUENCE = 256
_MAX_CREDIT = 4.0
_SLACK = 4.0  # whole prompts that everybody may compute before it counts who got more
_SLACK_SEQUENCES = 8.0  # the same where costs are not known
_NO_TIME_MS = 1e-6


@dataclass(slots=True, kw_only=True)
class Weighed:
    """Workers of one role that have room and were heard lately, by worker id. Their figures may be
    the table's own: it is of use until something more is heard.

    ``unit_ms`` is what 1 means in ``candidates``; 0: costs are not known, and it is a sequence.
    """

    table: PoolTable
    rows: Rows
    columns: Columns
    candidates: Candidates
    cached: Floats  # tokens of this prompt that each one holds
    unit_ms: float

    def __len__(self) -> int:
        return len(self.rows)

    def worker(self, place: int) -> str:
        """The id of the one at ``place``."""
        return self.table.workers[int(self.rows[place])]


class Pool(NamedTuple):
    """Who may be asked, and by what: one decision's view."""

    outlook: Outlook
    distances: Distances
    served: str
    role: str
    now_s: float

    @property
    def table(self) -> PoolTable:
        """The workers of the model."""
        return self.outlook.table(self.served)

    def weigh_prefill(self, num_prompt: int, found: Found) -> Weighed:
        """For a prompt of ``num_prompt`` tokens of which ``found`` is held."""
        some = self._able(must_have_room=True)
        columns, num = some.columns, len(some.rows)
        held = _held_tokens(self.table, found)
        most = max(0, num_prompt - 1)
        cached = np.zeros(num) if held is None else np.minimum(held[some.where], most)
        hit = cached / max(1, num_prompt)
        if not some.has_costs:
            return some.weighed(_by_sequences(columns, cached, hit, self.now_s), cached, 0.0)
        whole_ms = columns.compute_ms(num_prompt, 0.0)
        unit_ms = max(_NO_TIME_MS, _mean(whole_ms))
        away = self.distances.to_nearest(self.table, self.role, "decode")[some.places]
        travel_ms = num_prompt * columns["kv_token_bytes"]
        travel_ms *= away
        work_ms = whole_ms
        if held is not None:
            work_ms, fetch_ms = self._fetch_or_compute(some, num_prompt, cached, held)
            travel_ms += fetch_ms
        wait = columns.wait_ms(self.now_s)
        wait /= unit_ms
        work_ms /= unit_ms
        travel_ms /= unit_ms
        candidates = Candidates(
            hit=hit,
            wait=wait,
            work=work_ms,
            transfer=travel_ms,
            used=columns["used"],
            recent=_of_mean(columns.recent(self.now_s), _SLACK * unit_ms),
            backlog=_mean(wait),
        )
        return some.weighed(candidates, cached, unit_ms)

    def weigh_decode(
        self,
        fingerprint: str,
        source: str,
        num_tokens: int,
        answer_tokens: float,
        found: Found,
        *,
        must_have_room: bool = True,
    ) -> Weighed:
        """For a sequence of ``num_tokens`` whose blocks lie at ``source``. ``wait`` is the time
        that its whole answer takes there, in units of what it adds to the batch; who has no room
        for its blocks comes only when nobody has. A worker takes in one sequence's blocks after the
        other's, so ``transfer`` waits for those that are on their way there."""
        layout = self.table.layout_of(fingerprint)
        some = self._able(layout, must_have_room=must_have_room)
        fits = some.columns["free_tokens"] >= num_tokens
        if fits.any() and not fits.all():
            some = some.only(fits)
        columns = some.columns
        held = _held_tokens(self.table, found)
        nothing = np.zeros(len(some.rows))
        cached = nothing if held is None else np.minimum(held[some.where], num_tokens)
        hit = cached / max(1, num_tokens)
        if not some.has_costs:
            return some.weighed(_by_sequences(columns, nothing, hit, self.now_s), cached, 0.0)
        added_ms = answer_tokens * (
            columns["decode_sequence_ms"] + columns["decode_context_ms"] * num_tokens
        )
        unit_ms = max(_NO_TIME_MS, _mean(added_ms))
        away = self.distances.from_one(self.table, source, self.role)[some.places]
        travel_ms = (num_tokens - cached) * columns["kv_token_bytes"] * away
        travel_ms += columns.link_ms(self.now_s)
        candidates = Candidates(
            hit=hit,
            wait=(added_ms + answer_tokens * columns.step_ms()) / unit_ms,
            work=nothing,
            transfer=travel_ms / unit_ms,
            used=columns["used"],
            recent=np.ones(len(some.rows)),
            backlog=0.0,
        )
        return some.weighed(candidates, cached, unit_ms)

    def _able(self, layout: int | None = None, *, must_have_room: bool) -> _Some:
        table = self.table
        where = table.where(self.role)
        is_able = self.now_s - table.column("heard_s")[where] <= self.outlook.stale_s
        if must_have_room:
            is_able &= table.column("slots")[where] > 0
        if layout is not None:
            is_able &= table.column("layout")[where] == layout
        some = _Some(table, table.rows_of(self.role), where, table.take(where), slice(None))
        return some if np.count_nonzero(is_able) == len(is_able) else some.only(is_able)

    def _fetch_or_compute(
        self, some: _Some, num_prompt: int, cached: Floats, held: Floats
    ) -> tuple[Floats, Floats]:
        """Per candidate: what it computes, and how long the blocks travel that it fetches for it
        from whoever holds most; none where computing them is sooner."""
        columns = some.columns
        alone_ms = columns.compute_ms(num_prompt, cached)
        lender = int(held.argmax())
        most = min(held.item(lender), num_prompt - 1.0)
        away = self.distances.from_one(self.table, self.table.workers[lender], self.role)
        travel_ms = np.maximum(0.0, most - cached)
        travel_ms *= columns["kv_token_bytes"]
        travel_ms *= away[some.places]
        rest_ms = columns.compute_ms(num_prompt, most)  # nobody holds more
        is_sooner = travel_ms + rest_ms < alone_ms
        is_sooner &= columns["layout"] == self.table.column("layout")[lender]
        np.copyto(alone_ms, rest_ms, where=is_sooner)
        travel_ms *= is_sooner
        return alone_ms, travel_ms


class _Some(NamedTuple):
    """Some workers of a table: their rows, also as a slice, their figures, and their places among
    all of the role."""

    table: PoolTable
    rows: Rows
    where: Rows | slice
    columns: Columns
    places: Rows | slice

    @property
    def has_costs(self) -> bool:
        """Whether there are any, and all say what their steps cost."""
        if self.table.all_have_costs:
            return len(self.rows) > 0
        return len(self.rows) > 0 and bool(self.columns["has_costs"].all())

    def only(self, keep: npt.NDArray[np.bool_]) -> _Some:
        """Those of them."""
        rows, places = self.rows[keep], self.places
        places = np.flatnonzero(keep) if isinstance(places, slice) else places[keep]
        return _Some(self.table, rows, rows, self.table.take(rows), places)

    def weighed(self, candidates: Candidates, cached: Floats, unit_ms: float) -> Weighed:
        """They, as candidates."""
        return Weighed(
            table=self.table,
            rows=self.rows,
            columns=self.columns,
            candidates=candidates,
            cached=cached,
            unit_ms=unit_ms,
        )


def _by_sequences(columns: Columns, cached: Floats, hit: Floats, now_s: float) -> Candidates:
    busy = columns["running"] + columns["waiting"] + columns["since"]
    return Candidates(
        hit=hit,
        wait=busy + columns["waiting_tokens"] / TOKENS_PER_SEQUENCE,
        work=-np.minimum(cached / TOKENS_PER_SEQUENCE, _MAX_CREDIT),
        transfer=np.zeros(len(columns)),
        used=columns["used"],
        recent=_of_mean(columns.recent(now_s), _SLACK_SEQUENCES),
        backlog=0.0,
    )


def _of_mean(recent: Floats, slack: float) -> Floats:
    """In terms of the mean, ``slack`` being everybody's: the first few requests say nothing."""
    if len(recent):
        recent += slack
        recent /= _mean(recent)
    return recent


def _mean(values: Floats) -> float:
    """Three times as fast as ``values.mean()``, for a few hundred."""
    return float(values.sum()) / len(values)


def _held_tokens(table: PoolTable, found: Found) -> Floats | None:
    """[num_rows]: tokens of a prompt that each worker holds; those on a disk count half. None:
    nobody holds any."""
    if not found:
        return None
    held = found.worth(DISK_SHARE).take(table.places(found.roll))
    held *= table.column("block_size")
    return held
