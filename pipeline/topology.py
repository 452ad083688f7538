"""How fast keys and values go from one worker to another, by where both stand. Pure.

    same host   shared memory
    same rack   the switch above it
    same zone   the building's network
    else        whatever is between

A host stands in one rack, and a rack in one zone: where labels differ, equal names of hosts mean
nothing. A label that is not said is nobody else's: without labels workers are on one host, or far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.pool_table import Floats, PoolTable, Rows
from schemas.control import Beat

_MS_PER_BYTE = 1e-6  # at 1 GB/s

Where = tuple[str, str, str]  # host, rack, zone


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Gigabytes per second. The first is what shared memory gave on a machine of two cores
    (``mesh bench kv``); the others are what is left of 50, 25 and 10 Gbit/s."""

    host: float = 6.5
    rack: float = 5.0
    zone: float = 2.5
    other: float = 1.0

    def between(self, one: Where, other: Where) -> float:
        """The speed between two places."""
        if one[2] != other[2]:
            return self.other
        if one[1] == other[1] and one[0] == other[0]:
            return self.host
        if one[1] == other[1] and one[1]:
            return self.rack
        return self.zone if one[2] else self.other


def where(beat: Beat) -> Where:
    """Where a worker stands."""
    return beat.host, beat.rack, beat.zone


class Distances:
    """Milliseconds per byte between the workers of one table, kept until somebody comes or goes."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._kept: dict[object, tuple[PoolTable, int, Floats]] = {}

    def from_one(self, table: PoolTable, worker: str, role: str) -> Floats:
        """From ``worker`` to each one that has ``role``: [rows_of(role)]. 0 to itself; 0 for all
        where ``worker`` is not known."""

        def measure(rows: Rows) -> Floats:
            row = table.row(worker)
            if row is None:
                return np.zeros(len(rows))
            start = where(table.beats[row])
            speeds = [self._links.between(start, where(table.beats[one])) for one in rows.tolist()]
            return np.where(rows == row, 0.0, _MS_PER_BYTE / np.array(speeds, dtype=np.float64))

        return self._keep(table, (worker, role), role, measure)

    def to_nearest(self, table: PoolTable, role: str, of: str) -> Floats:
        """From each one that has ``role`` to the nearest that has the role ``of``, which may be
        itself: [rows_of(role)]. 0 for all where nobody has it."""

        def measure(rows: Rows) -> Floats:
            there = table.rows_of(of)
            ends = {where(table.beats[row]) for row in there.tolist()}
            if not ends:
                return np.zeros(len(rows))
            starts = [where(table.beats[row]) for row in rows.tolist()]
            best = {one: max(self._links.between(one, end) for end in ends) for one in set(starts)}
            away = np.array([_MS_PER_BYTE / best[one] for one in starts], dtype=np.float64)
            return np.where(np.isin(rows, there), 0.0, away)

        return self._keep(table, ("nearest", role, of), role, measure)

    def inward(self, table: PoolTable) -> Floats:
        """To each worker from those that prefill and hand over, on average: [num_rows]. 0 where
        nobody does."""

        def measure(_: Rows) -> Floats:
            handing = [beat for beat in table.beats if "prefill" in beat.roles]
            starts = Counter(where(beat) for beat in handing if "decode" not in beat.roles)
            if not starts:
                return np.zeros(table.num_rows)
            ends = [where(beat) for beat in table.beats]
            mean = {
                end: sum(num / self._links.between(start, end) for start, num in starts.items())
                / starts.total()
                for end in set(ends)
            }
            return np.array([_MS_PER_BYTE * mean[end] for end in ends], dtype=np.float64)

        return self._keep(table, "inward", "decode", measure)

    def _keep(
        self, table: PoolTable, key: object, role: str, measure: Callable[[Rows], Floats]
    ) -> Floats:
        kept = self._kept.get(key)
        if kept is None or kept[0] is not table or kept[1] != table.version:
            if kept is None and len(self._kept) > 4096:
                self._kept.clear()
            kept = self._kept[key] = (table, table.version, measure(table.rows_of(role)))
        return kept[2]
