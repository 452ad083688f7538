"""``mesh profile``: what a worker's steps cost, measured and kept, or those that are known."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.commands.operator import Config, Data, Json, Nats, as_control, run, settings_of_mesh
from infra.commands.profile_view import as_json, print_json, show, show_list
from infra.commands.roles import resolved_model
from infra.config import BusConfig, WorkerConfig
from infra.settings import Sources, load
from schemas.errors import BusUnavailable, ConfigError

if TYPE_CHECKING:
    from schemas.profiles import WorkerProfile
    from workers.profiling import Measured

_LIMIT_S = 75.0
_BARE_NOTE = "no mesh runs here; only shipped profiles are listed"

Flag = Annotated[str | None, typer.Option(help="as of mesh worker", show_default=False)]


def profile(
    model: Annotated[
        str | None,
        typer.Option(help="as of mesh worker", metavar="NAME=SOURCE", show_default=False),
    ] = None,
    dtype: Flag = None,
    kernels: Flag = None,
    device: Flag = None,
    threads: Flag = None,
    kv_memory: Flag = None,
    max_num_sequences: Flag = None,
    max_batch_tokens: Flag = None,
    repeats: Annotated[int, typer.Option(min=1, help="how often each shape is timed")] = 3,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a TOML file, and not to a mesh")
    ] = None,
    name: Annotated[
        str, typer.Option(help="of the profile; default: that of workers like this one")
    ] = "",
    list_all: Annotated[
        bool, typer.Option("--list", help="show the profiles that there are, and measure nothing")
    ] = False,
    json: Json = False,
    nats: Nats = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Measure what an engine's steps cost, for admission, router and simulated workers.

    The engine is that of a worker with the same settings. What is found goes to the registry of a
    mesh that runs, where workers like it find it when they start, or into a file. It takes a minute
    or so, in which the machine should do nothing else.
    """
    mesh = settings_of_mesh(nats, data, config)
    if list_all:
        run("mesh profile", _list(mesh, json))
    flags: dict[str, object] = {
        "model": model,
        "dtype": dtype,
        "kernels": kernels,
        "device": device,
        "threads": threads,
        "kv_memory": kv_memory,
        "max_num_sequences": max_num_sequences,
        "max_batch_tokens": max_batch_tokens,
    }
    worker = load(WorkerConfig, Sources.gather(file=config, flags=flags))
    if worker.engine == "simulated":
        raise ConfigError("a simulated engine costs what it is told", param="worker.engine")
    run("mesh profile", _profile(replace(worker, bus=mesh), repeats, name, out, json))


async def _profile(
    worker: WorkerConfig, repeats: int, name: str, out: Path | None, json: bool
) -> int:
    """Everything that can go wrong without measuring goes wrong before it."""
    if out is None:
        await _check_mesh(worker.bus)
    else:
        _check_out(out)
    os.environ.update(worker.thread_environment())  # torch reads it once, when imported
    from loadgen.machine import MachineNote, OthersMeter

    note, meter = MachineNote.now(), OthersMeter()
    made, measured = _measure(worker, repeats, name)
    note = note.meanwhile(meter.cores())
    if out is None:
        await _register(worker.bus, made)
    else:
        _write(out, made)
    where = "the mesh's registry" if out is None else str(out)
    if json:
        print_json({**as_json(made, measured), "written_to": where, "noise": note})
    else:
        show(made, measured)
        print(f"{note.text}\nwritten to {where}")
    return 0


async def _check_mesh(mesh: BusConfig) -> None:
    from pipeline.profiles import ProfileBook

    try:
        async with as_control(mesh, "profile") as bus:
            await ProfileBook(bus).all()
    except (ConfigError, BusUnavailable) as error:
        error.message += "; or give --out FILE"
        raise


async def _register(mesh: BusConfig, made: WorkerProfile) -> None:
    from pipeline.profiles import ProfileBook

    async with as_control(mesh, "profile") as bus:
        await ProfileBook(bus).put(made)


def _check_out(out: Path) -> None:
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"can't write {out}", param="--out")


def _write(out: Path, made: WorkerProfile) -> None:
    from pipeline.profile_files import format_profile

    try:
        out.write_text(format_profile(made), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"can't write {out}: {error.strerror}", param="--out") from error


def _measure(worker: WorkerConfig, repeats: int, name: str) -> tuple[WorkerProfile, Measured]:
    from infra.log import set_up_process
    from workers.factory import build_engine
    from workers.profiling import grid, measure, profile_of

    set_up_process("profile", level="warning", format="console", stream=sys.stderr)
    config = replace(
        worker, model=resolved_model(worker.model, worker.bus), kv_host_memory=0, role="both"
    )
    engine, served = build_engine(config)
    with engine.pool, _progress() as progress:
        points = grid(engine)
        measured = measure(engine, points, repeats=repeats, limit_s=_LIMIT_S, progress=progress)
        return profile_of(measured, engine.info, served, config.threads, name), measured


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, text: bar.update(task, completed=share, description=text)


async def _list(mesh: BusConfig, json: bool) -> int:
    from pipeline.profile_files import shipped_profiles
    from pipeline.profiles import ProfileBook

    registered: dict[str, WorkerProfile] = {}
    try:
        async with as_control(mesh, "profile") as bus:
            registered = await ProfileBook(bus).all()
    except ConfigError as error:
        if mesh.nats_url:
            raise
        print(f"mesh profile: {_BARE_NOTE} ({error.message})", file=sys.stderr)
    shipped = shipped_profiles()
    if json:
        print_json({"registered": list(registered.values()), "shipped": list(shipped.values())})
    else:
        show_list({"registered": registered, "shipped": shipped})
    return 0
