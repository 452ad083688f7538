"""The report of a fleet on the bus: the load's own, and what the fleet did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.machine import MachineNote
from loadgen.report import LoadReport, make_report, print_report
from loadgen.simulate_bus.run import Ran
from loadgen.simulate_bus.settings import ENGINES, BusRun
from workers.crew.figures import WorkerFigures

_LATE_SHARE = 0.02
_FOUND = (
    "device",
    "host",
    "disk",
    "remote",
)  # of a prompt's sources: not computed, nor handed over


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did while requests ran."""

    name: str
    role: str
    busy: float  # share of the time in which a step ran
    num_requests: int  # claimed here
    hit_rate: float | None  # of its prompts' tokens, not computed here; None: it computed none
    generated_tokens: int


class RoleLine(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one role together."""

    num_workers: int
    num_requests: int
    busy_mean: float
    busy_max: float
    most_over_mean: float | None  # requests of the busiest worker, over those of the mean one
    hit_rate: float | None


class FleetReport(LoadReport, frozen=True, kw_only=True, tag="load-report/1", tag_field="schema"):
    """Everything about one run: a load report, whose times are the fleet's, and the fleet. Its own
    times are the machine's."""

    engines: str = ENGINES
    speed: float
    time_scale: float
    num_processes: int  # of workers
    num_controls: int
    start_s: float  # until all workers were ready
    wall_s: float  # of the replay
    cores: dict[str, float]  # that each kind of process used; {}: one of them ended meanwhile
    cpu_us_per_token: float | None  # all of them together; None as above
    late_share: float  # of the steps' time that the machine added to it, being too slow
    roles: dict[str, RoleLine]
    workers: tuple[WorkerLine, ...]
    notes: tuple[str, ...]


def report_of(run: BusRun, ran: Ran, machine: MachineNote, *, is_interrupted: bool) -> FleetReport:
    """The report of what ``ran``."""
    load = make_report(ran.settings, ran.recorder, machine, is_interrupted=is_interrupted)
    told = load.settings | {
        "target": f"fleet {run.plan.name} on the bus",
        "model": run.plan.model,
        "trace": run.trace_name,
        "fleet": msgspec.to_builtins(run.plan),
    }
    num_tokens, cpu_s = ran.recorder.num_output_tokens, sum(ran.cpu_s.values())
    busy_s = sum(one.busy_s for one in ran.workers)
    late_s = sum(one.late_s for one in ran.workers)
    return FleetReport(
        **{name: getattr(load, name) for name in load.__struct_fields__ if name != "settings"},
        settings=told,
        speed=run.options.speed,
        time_scale=run.time_scale,
        num_processes=len(run.crews),
        num_controls=run.plan.routers,
        start_s=ran.start_s,
        wall_s=ran.wall_s,
        cores={kind: spent_s / ran.wall_s for kind, spent_s in sorted(ran.cpu_s.items())},
        cpu_us_per_token=1e6 * cpu_s / num_tokens if num_tokens and cpu_s else None,
        late_share=late_s / busy_s if busy_s else 0.0,
        roles={role: _role(_of(role, ran.workers), ran.wall_s) for role in _roles(ran.workers)},
        workers=tuple(_worker(one, ran.wall_s) for one in ran.workers),
        notes=ran.notes,
    )


def write_fleet(report: FleetReport, path: Path) -> None:
    """Write ``report`` to ``path``, indented. ``mesh load compare`` reads it, too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_fleet(report: FleetReport, console: Console) -> None:
    """Show it: the load's tables, then the fleet's."""
    print_report(report, console)
    table = Table("role", "workers", "requests", "busy", "busiest", "most / mean", "hit rate")
    for role, line in report.roles.items():
        table.add_row(
            role,
            str(line.num_workers),
            str(line.num_requests),
            f"{line.busy_mean:.1%}",
            f"{line.busy_max:.1%}",
            _or_dash(line.most_over_mean, ".2f"),
            _or_dash(line.hit_rate, ".1%"),
        )
    console.print(table)
    for text in lines_of(report):
        console.print(Text(text))
    for warning in fleet_warnings(report):
        console.print(Text(f"warning: {warning}", style="yellow"))


def lines_of(report: FleetReport) -> list[str]:
    """What it is a figure of, and what that cost, a line each."""
    lines = [
        f"{report.engines}: {len(report.workers)} workers in {report.num_processes} processes, "
        f"{report.num_controls} control, ready after {report.start_s:.1f} s",
        f"at {report.speed:g} times the fleet's speed, {report.wall_s:.1f} s of the machine; times "
        f"of the protocol x {report.time_scale:g}",
    ]
    if report.cores:
        cores = ", ".join(f"{kind} {used:.2f}" for kind, used in report.cores.items())
        lines.append(f"cores used: {cores}; in all {sum(report.cores.values()):.2f}")
    if report.cpu_us_per_token is not None:
        lines.append(f"{report.cpu_us_per_token:.0f} us of CPU per output token")
    return lines


def fleet_warnings(report: FleetReport) -> list[str]:
    """What whoever reads the figures must know."""
    lines = list(report.notes)
    if report.late_share > _LATE_SHARE:
        lines.append(
            f"the machine was too slow for this fleet: steps took {report.late_share:.0%} longer "
            "than their costs say; a lower --speed helps"
        )
    return lines


def _roles(workers: Sequence[WorkerFigures]) -> list[str]:
    return sorted({one.role for one in workers})


def _of(role: str, workers: Sequence[WorkerFigures]) -> list[WorkerFigures]:
    return [one for one in workers if one.role == role]


def _role(workers: Sequence[WorkerFigures], wall_s: float) -> RoleLine:
    requests = [one.num_requests for one in workers]
    busy = [one.busy_s / wall_s for one in workers]
    return RoleLine(
        num_workers=len(workers),
        num_requests=sum(requests),
        busy_mean=sum(busy) / len(busy),
        busy_max=max(busy),
        most_over_mean=max(requests) * len(requests) / sum(requests) if sum(requests) else None,
        hit_rate=_hit_rate(workers),
    )


def _worker(one: WorkerFigures, wall_s: float) -> WorkerLine:
    return WorkerLine(
        name=one.name,
        role=one.role,
        busy=one.busy_s / wall_s,
        num_requests=one.num_requests,
        hit_rate=_hit_rate([one]),
        generated_tokens=one.generated_tokens,
    )


def _hit_rate(workers: Sequence[WorkerFigures]) -> float | None:
    """Of the tokens that were there to be computed: a decode worker gets its prompts handed over,
    but for the last token, which is no miss of its cache."""
    found = sum(one.prompt_tokens.get(source, 0) for one in workers for source in _FOUND)
    computed = sum(one.prompt_tokens.get("computed", 0) for one in workers)
    return found / (found + computed) if found + computed else None


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
