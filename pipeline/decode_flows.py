"""What will be with decode workers, from all that is known of their pool. Pure.

runs     their beats
handed   a worker's own tasks, and its part of those in the shared queue
coming   what the prefill workers have, shared out among those that decode
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.answer_lengths import AnswerLengths
from pipeline.decode_flow import DecodeFlow, Group
from pipeline.pool_table import Floats, PoolTable
from pipeline.sent import SharedLine
from pipeline.topology import Distances
from schemas.control import Beat


class Told(NamedTuple):
    """What a beat says of a worker's decodes; the same until the next one.

    ``runs`` are in its batch, or have their KV there or on the way and are in line for it. Of a
    worker that prefills, too, those that wait are prompts.
    """

    runs: Group
    used_tokens: int  # of its memory, and what those in line need whose KV was taken from them
    total_tokens: int

    @classmethod
    def by(cls, beat: Beat) -> Told:
        """By this one."""
        load, size = beat.load, beat.block_size
        prefills = "prefill" in beat.roles
        used = (load.num_blocks - load.num_free_blocks) * size
        runs = Group()
        if "decode" in beat.roles:
            num_waiting = 0 if prefills else load.num_waiting
            if load.num_running:
                each = load.context_tokens / load.num_running
            else:
                each = used / max(1, num_waiting)
            num_tokens = load.context_tokens + num_waiting * each
            runs = Group(load.num_running + num_waiting, num_tokens)
        missing = 0 if prefills else load.waiting_tokens
        return cls(runs, used + missing, load.num_blocks * size)


class DecodeFlows:
    """Makes the flow of any decode worker, for one moment after the other: what is the same for
    all of a pool's workers is summed up once for each."""

    def __init__(self, distances: Distances, lengths: AnswerLengths) -> None:
        self._distances = distances
        self._lengths = lengths
        self._last: tuple[PoolTable, float, float, Group, float] | None = None

    def flow(
        self,
        table: PoolTable,
        line: SharedLine | None,
        beat: Beat,
        told: Told,
        load_s: float,
        at_s: float,
        now_s: float,
    ) -> DecodeFlow:
        """Of the worker that said ``beat``, whose load was measured at ``load_s``; for a look at
        ``at_s``, with what is known ``now_s``."""
        row = table.row(beat.worker)
        assert row is not None, "whoever is known has a row"
        way_token_ms = beat.kv_token_bytes * self._distances.inward(table).item(row)
        way_ms = table.way_ms(row, now_s)
        runs, handed, used = told.runs, _handed(table, row, line), float(told.used_tokens)
        if way_ms > 0 and way_token_ms > 0:  # those have their memory, and generate nothing yet
            travelling = runs.less(runs.num - way_ms / max(way_token_ms * runs.mean, 1e-9))
            runs, handed = runs.less(travelling.num), handed.plus(travelling)
            used -= travelling.tokens
        coming, level_ms = self._coming(table, at_s, now_s)
        way_ms = max(way_ms, handed.tokens * way_token_ms, level_ms)
        return DecodeFlow(
            costs=beat.costs,
            runs=runs,
            handed=handed,
            coming=coming,
            used_tokens=used,
            total_tokens=told.total_tokens,
            answer_tokens=self._lengths.mean(beat.served),
            way_ms=way_ms + 1000 * (now_s - load_s),
            way_token_ms=way_token_ms,
        )

    def _coming(self, table: PoolTable, at_s: float, now_s: float) -> tuple[Group, float]:
        """Those that each decode worker will get from prefills that are over between ``now_s`` and
        ``at_s``, and how long the way is taken before them: on average, for they go where it is
        free first."""
        last = self._last
        if last is not None and last[0] is table and last[1:3] == (at_s, now_s):
            return last[3], last[4]
        decoders = table.rows_of("decode")
        share, level_ms = Group(), 0.0
        if len(decoders):
            way_ms = 1000 * np.maximum(0.0, table.column("link_s")[decoders] - now_s)
            level_ms = float(way_ms.sum()) / len(decoders)
            if at_s > now_s:
                share = _prefilled(table, at_s, now_s).shared(len(decoders))
        self._last = (table, at_s, now_s, share, level_ms)
        return share, level_ms


def _prefilled(table: PoolTable, at_s: float, now_s: float) -> Group:
    """Whose prompts will be done by then. Of workers that hand over each prompt is known; of the
    others, and those that were there before this router, what they say."""
    rows = table.rows_of("prefill")
    total_ms = table.column("wait_ms")[rows]
    passed_ms = 1000 * (now_s - table.column("wait_s")[rows])
    left_ms = np.maximum(0.0, total_ms - np.maximum(0.0, passed_ms))
    in_time_ms = np.minimum(left_ms, 1000 * (at_s - now_s))
    told = table.column("waiting")[rows] + table.column("since")[rows]
    told_tokens = table.column("waiting_tokens")[rows] + table.column("since_prompts")[rows]
    told_done = _whole(told, in_time_ms / np.maximum(total_ms, 1e-9))
    prompts = table.column("prompts")[rows]
    in_time = np.where(left_ms > 0, in_time_ms / np.maximum(left_ms, 1e-9), 1.0)
    done = _whole(prompts, in_time)
    num = np.maximum(told * told_done, prompts * done)
    tokens = np.maximum(told_tokens * told_done, table.column("prompt_tokens")[rows] * done)
    return Group(float(num.sum()), float(tokens.sum()))


def _whole(num: Floats, done: Floats) -> Floats:
    """Which part of ``num`` prompts is over when ``done`` of their time is: none is half over."""
    return np.floor(num * done + 1e-9) / np.maximum(num, 1e-9)


def _handed(table: PoolTable, row: int, line: SharedLine | None) -> Group:
    """Decodes that no beat has told of: its own, and its part of those that are anybody's."""
    own = Group(*table.decodes_since(row))
    if line is None or not len(line):
        return own
    return own.plus(Group(len(line), line.num_tokens).shared(len(table.rows_of("decode"))))
