"""The report of a load run: as JSON, and as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.machine import MachineNote
from loadgen.measure import Distribution, Summary, summarize
from loadgen.recorder import Recorder
from loadgen.settings import LoadSettings
from loadgen.stages import StageTime
from schemas.errors import ConfigError

LATE_S = 0.010  # a send or a tick that comes later than this was delayed by the generator
MAX_LATE_SHARE = 0.01
MAX_CPU_SHARE = 0.85  # of one core: the generator is one thread

COLUMNS = ("mean", "p50", "p90", "p99", "max")  # of a latency
MEASURING_POINT = "client: request handed over -> token event read"


class GeneratorNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the generator itself cost, and whether it was too slow for its task."""

    cpu_s: float
    cpu_share: float  # of one core
    cpu_us_per_token: float | None
    lag_ms: Distribution  # open loop: sent - due
    num_late: int  # sends more than LATE_S after they were due
    loop_lag_ms: Distribution  # how late its own clock ticks came
    bottleneck: str  # "" or the reason why these figures are the generator's, not the server's


class LoadReport(
    msgspec.Struct, frozen=True, kw_only=True, tag="load-report/1", tag_field="schema"
):
    """Everything about one run. Times are milliseconds, rates are per second."""

    settings: dict[str, Any]
    started_unix_ms: int
    is_interrupted: bool
    measuring_point: str
    slo_ms: dict[str, float]
    summary: Summary
    generator: GeneratorNote
    machine: MachineNote
    by_tenant: dict[str, Summary] = msgspec.field(default_factory=dict)  # of a trace with several
    stages: dict[str, StageTime] = msgspec.field(default_factory=dict)  # where a mesh was watched


def make_report(
    settings: LoadSettings,
    recorder: Recorder,
    machine: MachineNote,
    *,
    is_interrupted: bool,
    stages: Mapping[str, StageTime] | None = None,
) -> LoadReport:
    """The report of what ``recorder`` holds."""
    summary = summarize(
        recorder.results,
        wall_s=recorder.wall_s,
        num_skipped=recorder.num_skipped,
        slo_ms=settings.slo_ms,
    )
    return LoadReport(
        settings=_public_settings(settings),
        started_unix_ms=recorder.started_unix_ms,
        is_interrupted=is_interrupted,
        measuring_point=MEASURING_POINT,
        slo_ms=settings.slo_ms,
        summary=summary,
        generator=_judge_generator(recorder),
        machine=machine,
        by_tenant=by_tenant(recorder, settings.slo_ms),
        stages=dict(stages or {}),
    )


def by_tenant(recorder: Recorder, slo_ms: dict[str, float]) -> dict[str, Summary]:
    """The figures of each tenant, where there are several."""
    tenants = sorted({result.tenant for result in recorder.results})
    if len(tenants) < 2:
        return {}
    return {
        tenant: summarize(
            [result for result in recorder.results if result.tenant == tenant],
            wall_s=recorder.wall_s,
            slo_ms=slo_ms,
        )
        for tenant in tenants
    }


def write_json(report: LoadReport, path: Path) -> None:
    """Write ``report`` to ``path``, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def read_json(path: Path) -> LoadReport:
    """The report in ``path``.

    Raises:
        ConfigError: it can't be read, or is no report of this version.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoadReport)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", param="report") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no report of mesh load: {error}", param="report") from error


def render(report: LoadReport) -> RenderableType:
    """The report as a table and a few lines."""
    summary = report.summary
    parts: list[RenderableType] = [_latency_table(report), Text("\n".join(rate_lines(report)))]
    if report.by_tenant:
        parts.append(_tenant_table(report))
    if report.stages:
        parts.append(_stage_table(report))
    if summary.errors:
        parts.append(_error_table(summary))
    parts += [Text(f"warning: {line}", style="yellow") for line in warnings_of(report)]
    parts.append(Text(f"measured at the {report.measuring_point}; {report.machine.text}", "dim"))
    return Group(*parts)


def print_report(report: LoadReport, console: Console) -> None:
    """Show ``report`` on ``console``."""
    console.print(render(report))


def _public_settings(settings: LoadSettings) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings, enc_hook=str))
    del values["api_key"], values["tenant_keys"]
    return values | {"target": settings.public_target}


def _judge_generator(recorder: Recorder) -> GeneratorNote:
    lags_s = [lag_s for result in recorder.results if (lag_s := result.lag_s) is not None]
    num_late = sum(lag_s > LATE_S for lag_s in lags_s)
    num_tokens = recorder.num_output_tokens
    cpu_share = recorder.cpu_s / recorder.wall_s if recorder.wall_s > 0 else 0.0
    return GeneratorNote(
        cpu_s=recorder.cpu_s,
        cpu_share=cpu_share,
        cpu_us_per_token=recorder.cpu_s / num_tokens * 1e6 if num_tokens else None,
        lag_ms=Distribution.of_seconds(lags_s),
        num_late=num_late,
        loop_lag_ms=Distribution.of_seconds(np.frombuffer(recorder.loop_lag_s)),
        bottleneck=_bottleneck(num_late, len(lags_s), cpu_share),
    )


def _bottleneck(num_late: int, num_scheduled: int, cpu_share: float) -> str:
    if num_scheduled and num_late > MAX_LATE_SHARE * num_scheduled:
        return f"{num_late} of {num_scheduled} requests were sent over {LATE_S * 1e3:g} ms late"
    if cpu_share > MAX_CPU_SHARE:
        return f"its one thread was busy {cpu_share:.0%} of the time"
    return ""


def latency_rows(summary: Summary) -> tuple[tuple[str, Distribution], ...]:
    """Each latency with its name."""
    return (
        ("TTFT", summary.ttft_ms),
        ("ITL", summary.itl_ms),
        ("TPOT", summary.tpot_ms),
        ("E2E", summary.e2e_ms),
    )


def _latency_table(report: LoadReport) -> Table:
    title = f"{report.settings['model']} at {report.settings['target']}"
    table = Table(title=title, title_justify="left")
    table.add_column("ms")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for label, spread in latency_rows(report.summary):
        table.add_row(label, *cells(spread))
    return table


def cells(spread: Distribution) -> tuple[str, ...]:
    """The values of :data:`COLUMNS`, as text."""
    values = (getattr(spread, name) for name in COLUMNS)
    return tuple("-" if value is None else f"{value:.2f}" for value in values)


def rate_lines(report: LoadReport) -> list[str]:
    """What came of the run, a line each."""
    summary = report.summary
    lines = [
        f"{summary.requests_per_s:.2f} requests/s   "
        f"{summary.output_tokens_per_s:.1f} output tokens/s   in {summary.wall_s:.1f} s",
        f"{summary.num_completed} completed, {summary.num_failed} failed, "
        f"{summary.num_unfinished} unfinished, {summary.num_skipped} skipped",
    ]
    if summary.goodput_per_s is not None:
        slo = ", ".join(f"{key} <= {limit:g} ms" for key, limit in report.slo_ms.items())
        lines.append(f"{summary.goodput_per_s:.2f} requests/s within the SLO ({slo})")
    lag = report.generator.lag_ms
    if lag.p99 is not None and lag.max is not None:
        lines.append(f"scheduling lag p99 {lag.p99:.2f} ms, most {lag.max:.2f} ms")
    return lines


def _tenant_table(report: LoadReport) -> Table:
    table = Table("tenant", "completed", "failed", "TTFT p50", "p99", "tokens/s")
    for tenant, summary in report.by_tenant.items():
        ttft = summary.ttft_ms
        table.add_row(
            Text(tenant or "-"),
            str(summary.num_completed),
            str(summary.num_failed),
            *("-" if value is None else f"{value:.2f}" for value in (ttft.p50, ttft.p99)),
            f"{summary.output_tokens_per_s:.1f}",
        )
    return table


def _stage_table(report: LoadReport) -> Table:
    table = Table("inside the mesh", "times", "mean ms", "s in all")
    for row, time in report.stages.items():
        table.add_row(Text(row), str(time.num), f"{time.mean_ms:.2f}", f"{time.total_s:.2f}")
    return table


def _error_table(summary: Summary) -> Table:
    table = Table("error", "count", "first message")
    for kind, count in summary.errors.items():
        table.add_row(Text(kind), str(count.num), Text(count.example[:200]))
    return table


def warnings_of(report: LoadReport) -> list[str]:
    """What whoever reads the figures must know."""
    summary, lines = report.summary, []
    if report.is_interrupted:
        lines.append("the run was interrupted; this is what was measured until then")
    if report.generator.bottleneck:
        lines.append(f"the generator was the bottleneck: {report.generator.bottleneck}")
    if summary.num_skipped:
        limit = report.settings["max_in_flight"]
        lines.append(f"{summary.num_skipped} requests were due while {limit} were in flight")
    if summary.num_unfinished and not report.is_interrupted:
        lines.append("unfinished requests are in no latency: the true ones are worse")
    if summary.num_short:
        lines.append(f"{summary.num_short} answers were shorter than asked for")
    if summary.num_without_usage:
        lines.append(f"{summary.num_without_usage} answers came without usage: events counted")
    return lines
