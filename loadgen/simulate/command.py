"""``mesh simulate``: a trace through a fleet that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, report
from loadgen.cli import Outputs
from loadgen.simulate.fleet_plan import EarlyRejection, PlacementPolicy
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from loadgen.simulate.options import SimulationOptions
    from loadgen.simulate.report import SimulationReport
    from loadgen.simulate.result import SimulationResult

_COMMAND = "mesh simulate"


def simulate(
    fleet: Annotated[Path, typer.Option(help="TOML: workers, links, routers")],
    trace: Annotated[Path, typer.Option(help="JSONL in Mooncake's form, or a recipe (.toml)")],
    policy: Annotated[
        PlacementPolicy | None, typer.Option(help="how workers are chosen; else as the fleet says")
    ] = None,
    early_rejection: Annotated[
        EarlyRejection | None,
        typer.Option(help="refuse by the decode load predicted for the prefill's end, or now's"),
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="to the first token")] = None,
    slo_tbt_ms: Annotated[
        float | None, typer.Option(help="between tokens; 99 of 100 of a request's gaps")
    ] = None,
    waiting_room: Annotated[
        bool | None, typer.Option(help="let requests wait for room; else with --policy score")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="requests per second, in place of the trace's own")
    ] = None,
    scale: Annotated[float, typer.Option(help="lengths of the trace times this")] = 1.0,
    requests: Annotated[int, typer.Option(help="of the trace, at most")] = 1_000_000,
    routers: Annotated[int | None, typer.Option(help="control processes")] = None,
    max_tokens: Annotated[
        int, typer.Option(help="told the mesh for each answer; 0: the trace's longest")
    ] = 0,
    seed: Annotated[int, typer.Option(help="of what is left to chance")] = 0,
    bus: Annotated[
        bool, typer.Option("--bus", help="on a real broker, with real processes, in real time")
    ] = False,
    speed: Annotated[
        float, typer.Option(help="--bus: fleet and trace so many times as fast")
    ] = 1.0,
    workers_per_process: Annotated[
        int | None, typer.Option(help="--bus: at most; else so many that all cores have some")
    ] = None,
    time_scale: Annotated[
        float | None, typer.Option(help="--bus: of beats, leases and windows; else by the fleet's")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="--bus: folder for the processes' logs")] = None,
    json: Annotated[Path | None, typer.Option(help="write the report there, too")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with plots there")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write Markdown tables there")] = None,
) -> None:
    """Run a trace through a fleet: the mesh's own decisions, simulated workers. On virtual time, or
    with --bus on the real bus."""
    from loadgen.simulate.options import SimulationOptions

    try:
        outputs = Outputs(json=json, html=html, markdown=markdown)
        options = SimulationOptions(
            placement=policy,
            early_rejection=early_rejection,
            slo_ttft_ms=slo_ttft_ms,
            slo_tbt_ms=slo_tbt_ms,
            waiting_room=waiting_room,
            routers=routers,
            max_tokens=max_tokens,
            scale=scale,
            seed=seed,
        )
        if bus:
            from loadgen.simulate_bus.command import simulate_on_bus
            from loadgen.simulate_bus.settings import BusOptions, bus_run

            how = BusOptions(
                speed=speed,
                workers_per_process=workers_per_process,
                time_scale=time_scale,
                trace_scale=scale,
                seed=seed,
            )
            run = bus_run(fleet, trace, rate, requests, options, how)
            raise typer.Exit(simulate_on_bus(run, outputs, logs))
    except ConfigError as error:
        raise typer.Exit(report(_COMMAND, error)) from error
    raise typer.Exit(_run(fleet, trace, rate, requests, options, outputs))


def _run(
    fleet: Path,
    trace: Path,
    rate: float | None,
    num_requests: int,
    options: SimulationOptions,
    outputs: Outputs,
) -> int:
    """Run, show and write; the exit code: 0 when any request was answered."""
    from rich.console import Console

    from loadgen.machine import MachineNote
    from loadgen.simulate.fleet_plan import read_fleet
    from loadgen.simulate.report import make_simulation_report, print_simulation
    from loadgen.simulate.run import simulate as run_simulation
    from loadgen.simulate.trace_rate import read_trace_at

    machine = MachineNote.now()
    try:
        plan = read_fleet(fleet)
        entries = read_trace_at(trace, rate)[:num_requests]
        result = run_simulation(plan, entries, options)
    except ConfigError as error:
        return report(_COMMAND, error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    done = make_simulation_report(result, machine, str(trace), rate)
    print_simulation(done, Console())
    _write(done, result, outputs)
    return 0 if done.summary.num_completed else EXIT_FAILED


def _write(done: SimulationReport, result: SimulationResult, outputs: Outputs) -> None:
    from loadgen.simulate.report import write_simulation

    if outputs.json is not None:
        write_simulation(done, outputs.json)
    if outputs.markdown is not None:
        from loadgen.markdown_report import write_markdown

        write_markdown(done, outputs.markdown)
    if outputs.html is not None:
        from loadgen.html_report import write_html
        from loadgen.simulate.plots import pools_plot

        plot = pools_plot(result.samples, result.slo_ms)
        write_html(done, result.recorder, outputs.html, more_plots=(plot,))
