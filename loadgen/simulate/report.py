"""The report of a simulation: that of a load run, and what the fleet did.

``mesh load compare`` takes it as it takes any: the fields of a load report are the same.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.machine import MachineNote
from loadgen.measure import Distribution, summarize
from loadgen.report import GeneratorNote, LoadReport, by_tenant, render
from loadgen.simulate.pool_samples import PoolSamples
from loadgen.simulate.result import SimulationResult, WorkerFigures

MEASURING_POINT = "client of a simulated fleet, on virtual time: no figure is of a real engine"


class DecisionTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of this machine's CPU for placing a prompt; None: nothing was placed."""

    num: int
    mean: float | None
    p50: float | None
    p99: float | None


class SimulationReport(
    LoadReport, frozen=True, kw_only=True, tag="load-report/1", tag_field="schema"
):
    """Everything about one simulation. Rates and latencies are of virtual time."""

    simulated: bool = True
    offered_per_s: float
    goodput_share: float | None  # of all requests; None without an SLO
    hit_rate: float  # of the tokens of answered prompts
    busy_max_over_mean: dict[str, float]  # by role
    kv_gigabytes_moved: float
    decisions_us: DecisionTimes
    cpu_s: float  # of this machine, for the whole run
    speed: float  # virtual seconds per second of CPU
    num_events: int
    workers: tuple[WorkerFigures, ...]
    pools: PoolSamples


def make_simulation_report(
    result: SimulationResult, machine: MachineNote, trace: str, rate: float | None = None
) -> SimulationReport:
    """The report of a run.

    Args:
        trace: what it is called.
        rate: requests per second that the trace was brought to; None: its own.
    """
    plan, options, recorder = result.plan, result.options, result.recorder
    offered_s = max(result.offered_s, 1e-9)
    roles = sorted({worker.role for worker in result.workers})
    return SimulationReport(
        settings={
            "target": f"simulated fleet {plan.name}",
            "model": plan.model,
            "trace": trace,
            "rate": rate,
            "trace_scale": options.scale,
            "seed": options.seed,
            "router": plan.router,
            "routers": plan.routers,
            "policy": msgspec.to_builtins(plan.policy),
            "fleet": msgspec.to_builtins(plan),
        },
        started_unix_ms=0,
        is_interrupted=False,
        measuring_point=MEASURING_POINT,
        slo_ms=result.slo_ms,
        summary=summarize(recorder.results, wall_s=result.virtual_s, slo_ms=result.slo_ms),
        generator=GeneratorNote(
            cpu_s=result.cpu_s,
            cpu_share=1.0,
            cpu_us_per_token=None,
            lag_ms=Distribution(num=0),
            num_late=0,
            loop_lag_ms=Distribution(num=0),
            bottleneck="",
        ),
        machine=machine,
        by_tenant=by_tenant(recorder, result.slo_ms),
        offered_per_s=len(recorder.results) / offered_s,
        goodput_share=result.goodput_share() if result.slo_ms else None,
        hit_rate=result.hit_rate,
        busy_max_over_mean={role: result.busy_max_over_mean(role) for role in roles},
        kv_gigabytes_moved=result.kv_bytes_moved / 1e9,
        decisions_us=decision_times(result),
        cpu_s=result.cpu_s,
        speed=result.virtual_s / max(result.cpu_s, 1e-9),
        num_events=result.num_events,
        workers=result.workers,
        pools=result.samples,
    )


def decision_times(result: SimulationResult) -> DecisionTimes:
    """How long the run's decisions took this machine."""
    values = np.frombuffer(result.decisions_s, dtype=np.float64) * 1e6
    if not len(values):
        return DecisionTimes(num=0, mean=None, p50=None, p99=None)
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return DecisionTimes(num=len(values), mean=float(values.mean()), p50=p50, p99=p99)


def write_simulation(report: SimulationReport, path: Path) -> None:
    """Write ``report`` to ``path``, indented."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_simulation(report: SimulationReport, console: Console) -> None:
    """Show ``report`` on ``console``."""
    console.print(render(report))
    console.print(_worker_table(report))
    for line in fleet_lines(report):
        console.print(Text(line))


def fleet_lines(report: SimulationReport) -> list[str]:
    """What the fleet did, a line each."""
    lines = [
        f"simulated: {len(report.workers)} workers, {report.offered_per_s:.2f} requests/s offered, "
        f"{report.hit_rate:.1%} of prompt tokens cached, "
        f"{report.kv_gigabytes_moved:.1f} GB of KV moved"
    ]
    if report.goodput_share is not None:
        lines.append(f"{report.goodput_share:.1%} of all requests within the SLO")
    if report.decisions_us.mean is not None:
        times = report.decisions_us
        lines.append(
            f"placing a prompt took {times.mean:.0f} us of CPU, p50 {times.p50:.0f}, "
            f"p99 {times.p99:.0f}"
        )
    lines.append(
        f"{report.cpu_s:.1f} s of CPU: {report.speed:.0f} times as fast as real time, "
        f"{report.num_events} events"
    )
    return lines


def _worker_table(report: SimulationReport) -> Table:
    """By role; hundreds of workers would be no table."""
    table = Table("role", "workers", "busy mean", "most", "max / mean", "tasks", "preempted")
    for role, ratio in report.busy_max_over_mean.items():
        some = [worker for worker in report.workers if worker.role == role]
        shares = [worker.busy_share for worker in some]
        table.add_row(
            role,
            str(len(some)),
            f"{sum(shares) / len(shares):.1%}",
            f"{max(shares):.1%}",
            f"{ratio:.2f}",
            str(sum(worker.num_taken for worker in some)),
            str(sum(worker.num_preemptions for worker in some)),
        )
    return table
