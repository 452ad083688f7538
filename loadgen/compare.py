"""``mesh load compare A.json B.json``: what the second run does better or worse than the first."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from loadgen.report import LoadReport, latency_rows

_SHOWN = ("mean", "p50", "p90", "p99")
# What makes two runs different loads, so that their figures can't be set against each other.
_MUST_BE_EQUAL = (
    "model", "rate", "ramp_to", "burstiness", "concurrency", "input_len", "output_len", "endpoint",
    "prompt", "seed", "trace", "trace_speed", "trace_scale", "max_len",
)  # fmt: skip


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both runs. ``ratio`` is second / first; None where one is missing or zero."""

    figure: str
    unit: str
    first: float | None
    second: float | None
    ratio: float | None
    is_less_better: bool


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two runs side by side; ``differences`` names settings in which the loads differ."""

    figures: tuple[Compared, ...]
    differences: tuple[str, ...]
    warnings: tuple[str, ...]


def compare(first: LoadReport, second: LoadReport) -> Comparison:
    """Set ``second`` against ``first``."""
    figures = [
        _compared(f"{name} {column}", "ms", getattr(a, column), getattr(b, column), less=True)
        for (name, a), (_, b) in zip(
            latency_rows(first.summary), latency_rows(second.summary), strict=True
        )
        for column in _SHOWN
    ]
    for figure in ("requests_per_s", "output_tokens_per_s", "goodput_per_s"):
        a, b = getattr(first.summary, figure), getattr(second.summary, figure)
        figures.append(_compared(figure.removesuffix("_per_s"), "1/s", a, b, less=False))
    for figure in ("num_completed", "num_failed", "num_unfinished", "num_cached_tokens"):
        a, b = getattr(first.summary, figure), getattr(second.summary, figure)
        less = figure in ("num_failed", "num_unfinished")
        figures.append(_compared(figure.removeprefix("num_"), "", a, b, less=less))
    return Comparison(
        figures=tuple(figures),
        differences=tuple(_differences(first, second)),
        warnings=tuple(_warnings((first, second))),
    )


def render(comparison: Comparison) -> Table:
    """A table for people; what became worse by a twentieth or more is red, better green."""
    table = Table("", "first", "second", "second / first")
    for row in comparison.figures:
        table.add_row(
            Text(f"{row.figure} {row.unit}".strip()),
            _number(row.first),
            _number(row.second),
            Text(_number(row.ratio), style=_style(row)),
        )
    return table


def _compared(
    figure: str, unit: str, first: float | None, second: float | None, *, less: bool
) -> Compared:
    ratio = second / first if first and second is not None else None
    return Compared(
        figure=figure, unit=unit, first=first, second=second, ratio=ratio, is_less_better=less
    )


def _differences(first: LoadReport, second: LoadReport) -> list[str]:
    a, b = first.settings, second.settings
    names = [name for name in _MUST_BE_EQUAL if a.get(name) != b.get(name)]
    lines = [f"{name}: {a.get(name)} and {b.get(name)}" for name in names]
    if first.slo_ms != second.slo_ms:
        lines.append(f"slo: {first.slo_ms} and {second.slo_ms}")
    return lines


def _warnings(reports: Sequence[LoadReport]) -> list[str]:
    lines = []
    for name, report in zip(("first", "second"), reports, strict=True):
        if report.generator.bottleneck:
            lines.append(f"{name}: the generator was the bottleneck")
        if report.is_interrupted:
            lines.append(f"{name}: the run was interrupted")
        if report.machine.is_busy:
            lines.append(f"{name}: the machine was busy")
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def _style(row: Compared) -> str:
    if row.ratio is None or abs(row.ratio - 1) < 0.05:
        return ""
    return "green" if (row.ratio < 1) == row.is_less_better else "red"
