"""``mesh bench idle``: what a mesh at rest costs, in CPU time of each of its processes."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.own_mesh import own_mesh
from loadgen.bench.processes import processes_of_mesh
from loadgen.bench.result import BenchResult
from loadgen.machine import MachineNote
from schemas.errors import ConfigError, MeshError

_SETTLE_S = 5.0  # what follows a start, such as the engine's look at its books
_MAX_SECONDS = 3600.0


def command(
    seconds: Annotated[float, typer.Option(help="how long to watch")] = 60.0,
    engine: Annotated[
        str, typer.Option(help="engine of the workers: simulated, torch")
    ] = "simulated",
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Start a mesh (one prefill, one decode worker), leave it alone, and count its CPU time."""
    machine = MachineNote.now()
    try:
        if not 1 <= seconds <= _MAX_SECONDS:
            raise ConfigError(f"seconds is not within 1 and {_MAX_SECONDS:g}", param="seconds")
        percent = asyncio.run(measure(seconds, engine))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench idle", ours)) from error
    BenchResult(
        bench="idle",
        figures={"percent_of_a_core": percent},
        settings={"seconds": seconds, "engine": engine, "prefill": 1, "decode": 1},
        machine=machine,
        notes=("user and system time over wall time; processes of one kind together",),
    ).show(as_json=json)


async def measure(seconds: float, engine: str) -> dict[str, float]:
    """CPU time of each kind of process, and in all, in percent of one core.

    Raises:
        MeshNotStarted: there is no mesh to watch.
    """
    flags = ("--engine", engine, "--prefill", "1", "--decode", "1")
    async with own_mesh(flags) as mesh:
        await asyncio.sleep(_SETTLE_S)
        processes = processes_of_mesh(mesh.pid)
        before_s, began_s = processes.cpu_s(), time.monotonic()
        await asyncio.sleep(seconds)
        spent_s, took_s = processes.since(before_s), time.monotonic() - began_s
    percent = {kind: round(100 * spent_s[kind] / took_s, 2) for kind in sorted(spent_s)}
    return percent | {"total": round(100 * sum(spent_s.values()) / took_s, 2)}
