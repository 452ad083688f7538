"""What the commands of an operator share: options that name a mesh, a connection to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.config import BusConfig
from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from infra.settings import Sources, load
from schemas.errors import MeshError

if TYPE_CHECKING:
    from infra.bus import Bus

CONNECT_S = 3.0  # a person waits

Nats = Annotated[
    str | None, typer.Option(help="broker URL; default: DATA/bus.env", show_default=False)
]
Data = Annotated[str | None, typer.Option(help="data directory of the mesh", show_default=False)]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout")]


def settings_of_mesh(nats: str | None, data: str | None, config: Path | None) -> BusConfig:
    """Where the mesh is, by options, environment and file."""
    return load(BusConfig, Sources.gather(file=config, flags={"nats_url": nats, "data": data}))


@asynccontextmanager
async def as_control(settings: BusConfig, name: str) -> AsyncIterator[Bus]:
    """A connection with the rights of control.

    Raises:
        ConfigError, BusUnavailable: there is no mesh to be found, or it can't be reached.
    """
    from infra.bus import Bus
    from infra.times import Times

    times = Times(connect_timeout_s=CONNECT_S).scaled(settings.time_scale)
    url = settings.url("control")
    async with await Bus.connect(url, role="control", name=name, times=times) as bus:
        yield bus


def run(command: str, work: Coroutine[Any, Any, int]) -> None:
    """Run ``work`` to its exit code; an error of ours becomes one line."""
    try:
        code = asyncio.run(work)
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report(command, ours)) from error
    raise typer.Exit(code)
