"""``mesh status``: processes, models and queues of a mesh that runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from infra.config import BusConfig
from infra.settings import Sources, load

CONNECT_S = 3.0  # a person waits


def status(
    nats: Annotated[
        str | None, typer.Option(help="broker URL; default: DATA/bus.env", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="data directory of the mesh", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file")] = None,
) -> None:
    """List processes, models and queues of a mesh that runs."""
    settings = load(BusConfig, Sources.gather(file=config, flags={"nats_url": nats, "data": data}))
    asyncio.run(_status(settings, json))


async def _status(settings: BusConfig, json: bool) -> None:
    import msgspec
    from rich.console import Console

    from infra.bus import Bus
    from infra.status import gather, show
    from infra.times import Times

    times = Times(connect_timeout_s=CONNECT_S).scaled(settings.time_scale)
    url = settings.url("control")
    async with await Bus.connect(url, role="control", name="status", times=times) as bus:
        found = await gather(bus)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        show(found, Console(highlight=False))
