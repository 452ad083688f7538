"""The report of a load run, and of two compared, as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from loadgen.report import COLUMNS, LoadReport, cells, latency_rows, rate_lines, warnings_of


def markdown_report(report: LoadReport) -> str:
    """Tables and lines of ``report``."""
    settings, summary = report.settings, report.summary
    parts = [f"## {settings['model']} at {settings['target']}"]
    parts += [f"> {line}" for line in warnings_of(report)]
    parts.append("\n".join(f"- {line}" for line in rate_lines(report)))
    latencies = [(name, *cells(spread)) for name, spread in latency_rows(summary)]
    parts.append(markdown_table(("ms", *COLUMNS), latencies))
    if report.by_tenant:
        rows = [(name or "-", *cells(one.ttft_ms)) for name, one in report.by_tenant.items()]
        parts.append(markdown_table(("tenant: TTFT, ms", *COLUMNS), rows))
    if report.stages:
        stages = [
            (row, str(time.num), f"{time.mean_ms:.2f}", f"{time.total_s:.2f}")
            for row, time in report.stages.items()
        ]
        parts.append(markdown_table(("inside the mesh", "times", "mean ms", "s in all"), stages))
    if summary.errors:
        errors = [(kind, str(one.num), one.example) for kind, one in summary.errors.items()]
        parts.append(markdown_table(("error", "count", "first message"), errors))
    parts.append(f"Measured at the {report.measuring_point}; {report.machine.text}.")
    return "\n\n".join(parts) + "\n"


def write_markdown(report: LoadReport, path: Path) -> None:
    """Write it to ``path``."""
    path.write_text(markdown_report(report))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The first column to the left, the others to the right; what would end a cell is escaped."""
    rule = [":--", *(["--:"] * (len(head) - 1))]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
