"""``mesh chaos``: flags to settings, exit code."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from infra.config import DEFAULT_MODEL, BusConfig
from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from infra.mesh_file import read_mesh_file
from infra.settings import Sources, load
from infra.transport.plan import CHOICES
from loadgen.chaos.faults import FAULTS
from loadgen.chaos.settings import (
    QUICK_FAULTS,
    QUICK_SPEED,
    QUICK_TIME_SCALE,
    QUICK_TORCH_FAULTS,
    RANDOM,
    ChaosSettings,
)
from loadgen.loop import fast_loop
from schemas.errors import MeshError

_WIDTH = 150  # of the table where there is no terminal


def chaos(
    all_faults: Annotated[bool, typer.Option("--all", help="every fault, in turn")] = False,
    fault: Annotated[
        list[str] | None, typer.Option(help=f"one fault, may be repeated: {', '.join(FAULTS)}")
    ] = None,
    point: Annotated[str, typer.Option(help="where the marked request is, or random")] = RANDOM,
    count: Annotated[int | None, typer.Option(help="faults in all; default: each once")] = None,
    engine: Annotated[Literal["simulated", "torch"], typer.Option()] = "simulated",
    quick: Annotated[bool, typer.Option(help="some of each kind, in less than a minute")] = False,
    seed: Annotated[int, typer.Option(help="of requests, points and targets")] = 0,
    model: Annotated[
        str, typer.Option(help="NAME=SOURCE, or the NAME of a model of a running mesh")
    ] = f"{DEFAULT_MODEL.name}={DEFAULT_MODEL.source}",
    time_scale: Annotated[
        float | None, typer.Option(help="all times of the protocol, and of faults, by this")
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="of the simulated engine; 1, or 2 with --quick")
    ] = None,
    streams: Annotated[int, typer.Option(help="requests beside the marked one")] = 10,
    tokens: Annotated[int, typer.Option(help="length of most answers")] = 60,
    controls: Annotated[int, typer.Option(help="control processes of a mesh of our own")] = 2,
    timeout: Annotated[float, typer.Option(help="deadline of each request, seconds")] = 60.0,
    overlap: Annotated[int, typer.Option(help="faults at a time")] = 1,
    kv_transports: Annotated[
        str, typer.Option(help=f"of the workers of a mesh of our own: {', '.join(CHOICES)}")
    ] = "auto",
    attach: Annotated[
        bool, typer.Option("--attach", help="break the mesh that runs on this host")
    ] = False,
    nats: Annotated[str, typer.Option(help="its broker, as a client")] = "",
    control_nats: Annotated[str, typer.Option(help="its broker, as control")] = "",
    bridge: Annotated[list[str] | None, typer.Option(help="its bridges, http://…")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="data directory: of the running mesh, or for ours, which is kept"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON as the last line")] = False,
) -> None:
    """Break a mesh under load, and check every token that its clients read.

    Starts a mesh of its own (2 prefill workers, 2 decode workers, 2 bridges) unless told
    --attach. Exit code 1 when a token was lost, repeated or wrong, a request failed or hung, or
    anything leaked.
    """
    try:
        usual = QUICK_TORCH_FAULTS if engine == "torch" else QUICK_FAULTS
        names = tuple(FAULTS) if all_faults else tuple(fault or (usual if quick else ()))
        usual_scale, usual_speed = (QUICK_TIME_SCALE, QUICK_SPEED) if quick else (1.0, 1.0)
        places = _attached(nats, control_nats, bridge or [], data) if attach or nats else {}
        settings = ChaosSettings(
            faults=names,
            point=point,
            count=len(names) if count is None else count,
            engine=engine,
            model=model,
            seed=seed,
            time_scale=usual_scale if time_scale is None else time_scale,
            speed=usual_speed if speed is None else speed,
            num_streams=streams,
            num_tokens=tokens,
            num_controls=controls,
            timeout_s=timeout,
            overlap=overlap,
            folder=None if places else data,
            kv_transports=kv_transports,
            **places,
        )
        code = _run(settings, as_json=json)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh chaos", ours)) from error
    raise typer.Exit(code)


def _attached(nats: str, control: str, bridges: list[str], data: Path | None) -> dict[str, Any]:
    """Where a running mesh is: what was given, else what its data directory says."""

    def settings(nats_url: str) -> BusConfig:
        given = {"nats_url": nats_url or None, "data": str(data) if data else None}
        return load(BusConfig, Sources.gather(flags=given))

    bus = settings(nats)
    found = read_mesh_file(bus.data)
    if not bridges and found is not None and not nats:
        bridges = [found.url]
    return {
        "nats_url": bus.url("client"),
        "control_nats_url": settings(control or nats).url("control"),
        "bridges": tuple(bridges),
    }


def _run(settings: ChaosSettings, *, as_json: bool) -> int:
    import msgspec
    import structlog
    from rich.console import Console

    from loadgen.chaos.run import run_chaos

    # Our own connections break, too: what is said of that belongs beside the progress.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    progress = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        progress.print(line, markup=False)

    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        found = runner.run(run_chaos(settings, say))
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(found.table())
    for note in found.notes:
        console.print(note, markup=False)
    if as_json:
        print(msgspec.json.encode(found.content()).decode())
    return 0 if found.total.is_clean else EXIT_FAILED
