"""What a chaos run found: counts per fault and in all, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from loadgen.chaos.answer import Answer, compare, is_usage_wrong

_NOT_FAILURES = ("faults", "streams")
_GROUPS = {
    "kill": "all killed", "freeze": "all frozen", "freeze-broker": "frozen broker, from its thaw",
    "term": "all ended in order", "other": "all others",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one kind of fault, or of all."""

    faults: int = 0
    streams: int = 0
    lost_tokens: int = 0
    duplicate_tokens: int = 0
    wrong_tokens: int = 0
    usage_errors: int = 0
    failed_requests: int = 0
    hung_requests: int = 0
    leaked_blocks: int = 0
    leaked_processes: int = 0
    recoveries_s: list[float] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count ``other``, too."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.recoveries_s += other.recoveries_s

    def judge(self, expected: Answer, got: Answer) -> str:
        """Count one stream; says what is wrong with it, "" for nothing."""
        self.streams += 1
        if not got.has_ended:
            self.hung_requests += 1
            return "hung"
        if got.error:
            self.failed_requests += 1
            return f"{got.error}: {got.message}"
        found = compare(expected, got)
        self.lost_tokens += found.lost
        self.duplicate_tokens += found.duplicate
        self.wrong_tokens += found.wrong
        if found:
            return f"{found.lost} lost, {found.duplicate} duplicate, {found.wrong} wrong tokens"
        if is_usage_wrong(expected.usage, got.usage):
            self.usage_errors += 1
            return f"usage {got.usage}, not {expected.usage}"
        return ""

    @property
    def is_clean(self) -> bool:
        """Every column that counts failures is zero."""
        return not any(getattr(self, name) for name in COUNTS if name not in _NOT_FAILURES)

    def content(self) -> dict[str, Any]:
        """For JSON."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, "recovery_s": spread(self.recoveries_s)}


COUNTS = tuple(one.name for one in fields(Tally) if one.name != "recoveries_s")


def spread(values_s: list[float]) -> dict[str, float | None]:
    """Percentiles, to milliseconds; None when there is no value."""
    if not values_s:
        return {"p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(values_s, (50, 99)).tolist()
    return {"p50": round(p50, 3), "p99": round(p99, 3), "max": round(max(values_s), 3)}


@dataclass(slots=True, kw_only=True)
class ChaosReport:
    """A whole run. ``notes`` are facts that the figures need."""

    engine: str
    settings: dict[str, Any]
    title: str = ""
    by_fault: dict[str, Tally] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # fault -> kill, freeze, term, other
    at_end: Tally = field(default_factory=Tally)  # what belongs to no fault
    notes: list[str] = field(default_factory=list)

    def of(self, fault: str, kind: str) -> Tally:
        """The tally of one fault, made when first asked for."""
        self.kinds[fault] = kind
        return self.by_fault.setdefault(fault, Tally())

    def of_kind(self, kind: str) -> Tally:
        """The sum over the faults of one kind."""
        return _sum(self.by_fault[fault] for fault, k in self.kinds.items() if k == kind)

    @property
    def _kinds(self) -> list[str]:
        return [kind for kind in _GROUPS if kind in self.kinds.values()]

    @property
    def total(self) -> Tally:
        """Everything."""
        return _sum([*self.by_fault.values(), self.at_end])

    def content(self) -> dict[str, Any]:
        """For JSON."""
        by_kind = {kind: spread(self.of_kind(kind).recoveries_s) for kind in self._kinds}
        return {
            **self.total.content(),
            "engine": self.engine,
            "recovery_by_kind_s": by_kind,
            "by_fault": {name: tally.content() for name, tally in sorted(self.by_fault.items())},
            "settings": self.settings,
            "notes": self.notes,
        }

    def table(self) -> Table:
        """For people."""
        titles = {
            "faults": "faults", "streams": "streams", "lost_tokens": "lost",
            "duplicate_tokens": "twice", "wrong_tokens": "wrong", "usage_errors": "usage",
            "failed_requests": "failed", "hung_requests": "hung", "leaked_blocks": "blocks",
            "leaked_processes": "procs",
        }  # fmt: skip
        table = Table(title=self.title or f"mesh chaos, {self.engine} engine", title_justify="left")
        table.add_column("fault")
        for name in COUNTS:
            table.add_column(titles[name], justify="right")
        for name in ("p50 s", "p99 s", "max s"):
            table.add_column(name, justify="right")
        for fault, tally in sorted(self.by_fault.items()):
            table.add_row(fault, *_cells(tally))
        table.add_section()
        for kind in self._kinds:
            table.add_row(_GROUPS[kind], *_cells(self.of_kind(kind)))
        table.add_section()
        table.add_row("all", *_cells(self.total))
        return table


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _cells(tally: Tally) -> list[Text]:
    cells = []
    for name in COUNTS:
        count = getattr(tally, name)
        is_bad = bool(count) and name not in _NOT_FAILURES
        cells.append(Text(str(count), style="bold red" if is_bad else ""))
    times = spread(tally.recoveries_s).values()
    return [*cells, *(Text("-" if value is None else f"{value:.2f}") for value in times)]
