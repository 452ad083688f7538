"""Candidates for one request as columns, from what is known of workers. Pure.

Where every candidate's costs are known, times are predicted: a prompt waits for what is before it,
then for the part of it that must be computed or fetched, whichever is sooner. Where one's are not,
all are compared by sequences, 256 prompt tokens counting as one:

    wait        sequences there, and their prompt tokens that wait
    work        minus what it holds of this prompt, at most four sequences' worth: so a worker that
                holds the prompt is preferred until it has four more to do than another
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.outlook import Outlook
from pipeline.pool_table import Columns, Floats, PoolTable, Rows
from pipeline.prefix_walk import Match
from pipeline.scoring import Candidates
from pipeline.topology import Distances

DISK_SHARE = 0.5  # of the worth of a block in memory
TOKENS_PER_SEQUENCE = 256
_MAX_CREDIT = 4.0
_SLACK = 4.0  # whole prompts that everybody may compute before it counts who got more
_SLACK_SEQUENCES = 8.0  # the same where costs are not known
_NO_TIME_MS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """Workers of one role that have room and were heard lately, by worker id.

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


@dataclass(frozen=True, slots=True)
class Pool:
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

    def weigh_prefill(self, num_prompt: int, matches: Mapping[str, Match]) -> Weighed:
        """For a prompt of ``num_prompt`` tokens of which workers hold ``matches``."""
        some = self._able(must_have_room=True)
        held = _held_tokens(self.table, matches.values())
        cached = np.minimum(held[some.rows], max(0, num_prompt - 1))
        hit = cached / max(1, num_prompt)
        columns = some.columns
        if not some.has_costs:
            return some.weighed(_by_sequences(columns, cached, hit, self.now_s), cached, 0.0)
        unit_ms = max(_NO_TIME_MS, _mean(columns.compute_ms(num_prompt, 0.0)))
        work_ms, travel_ms = self._fetch_or_compute(some, num_prompt, cached, held, matches)
        away = self.distances.to_nearest(self.table, self.role, "decode")[some.places]
        travel_ms = travel_ms + num_prompt * columns["kv_token_bytes"] * away
        wait = columns.wait_ms(self.now_s) / unit_ms
        candidates = Candidates(
            hit=hit,
            wait=wait,
            work=work_ms / unit_ms,
            transfer=travel_ms / unit_ms,
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
        matches: Mapping[str, Match],
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
        held = _held_tokens(self.table, matches.values())
        cached = np.minimum(held[some.rows], num_tokens)
        hit = cached / max(1, num_tokens)
        if not some.has_costs:
            nothing = np.zeros(len(some.rows))
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
            work=np.zeros(len(some.rows)),
            transfer=travel_ms / unit_ms,
            used=columns["used"],
            recent=np.ones(len(some.rows)),
            backlog=0.0,
        )
        return some.weighed(candidates, cached, unit_ms)

    def _able(self, layout: int | None = None, *, must_have_room: bool) -> _Some:
        table = self.table
        everyone = table.rows_of(self.role)
        is_able = self.now_s - table.column("heard_s")[everyone] <= self.outlook.stale_s
        if must_have_room:
            is_able &= table.column("slots")[everyone] > 0
        if layout is not None:
            is_able &= table.column("layout")[everyone] == layout
        places = np.flatnonzero(is_able)
        rows = everyone[places]
        return _Some(table, rows, table.take(rows), places)

    def _fetch_or_compute(
        self,
        some: _Some,
        num_prompt: int,
        cached: Floats,
        held: Floats,
        matches: Mapping[str, Match],
    ) -> tuple[Floats, Floats]:
        """Per candidate: what it computes, and how long the blocks travel that it fetches for it
        from whoever holds most; none where computing them is sooner."""
        columns = some.columns
        alone_ms = columns.compute_ms(num_prompt, cached)
        nothing = np.zeros(len(some.rows))
        if not matches:
            return alone_ms, nothing
        lender = int(held.argmax())
        most = min(float(held[lender]), num_prompt - 1.0)
        away = self.distances.from_one(self.table, self.table.workers[lender], self.role)
        travel_ms = np.maximum(0.0, most - cached) * columns["kv_token_bytes"] * away[some.places]
        rest_ms = columns.compute_ms(num_prompt, most)  # nobody holds more
        can_read = columns["layout"] == self.table.column("layout")[lender]
        is_sooner = can_read & (travel_ms + rest_ms < alone_ms)
        return np.where(is_sooner, rest_ms, alone_ms), np.where(is_sooner, travel_ms, nothing)


@dataclass(frozen=True, slots=True)
class _Some:
    """Some workers of a table: their rows, figures, and places among all of the role."""

    table: PoolTable
    rows: Rows
    columns: Columns
    places: Rows

    @property
    def has_costs(self) -> bool:
        """Whether there are any, and all say what their steps cost."""
        return len(self.rows) > 0 and bool(self.columns["has_costs"].all())

    def only(self, keep: npt.NDArray[np.bool_]) -> _Some:
        """Those of them."""
        rows = self.rows[keep]
        return _Some(self.table, rows, self.table.take(rows), self.places[keep])

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
    if not len(recent):
        return recent
    some = recent + slack
    return np.asarray(some / _mean(some))


def _mean(values: Floats) -> float:
    """Three times as fast as ``values.mean()``, for a few hundred."""
    return float(values.sum()) / len(values)


def _held_tokens(table: PoolTable, matches: Iterable[Match]) -> Floats:
    """[num_rows]: tokens of a prompt that each worker holds; those on a disk count half."""
    held = np.zeros(table.num_rows)
    for match in matches:
        row = table.row(match.worker)
        if row is not None:
            num_on_disk = match.num_blocks - match.num_memory
            held[row] = match.num_memory + DISK_SHARE * num_on_disk
    held *= table.column("block_size")
    return held
