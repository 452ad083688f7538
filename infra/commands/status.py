"""``mesh status``: processes, models and queues of a mesh that runs."""

from __future__ import annotations

from infra.commands.operator import Config, Data, Json, Nats, as_control, run, settings_of_mesh
from infra.config import BusConfig


def status(nats: Nats = None, data: Data = None, json: Json = False, config: Config = None) -> None:
    """List processes, models and queues of a mesh that runs."""
    run("mesh status", _status(settings_of_mesh(nats, data, config), json))


async def _status(settings: BusConfig, json: bool) -> int:
    import msgspec
    from rich.console import Console

    from infra.status import gather, show

    async with as_control(settings, "status") as bus:
        found = await gather(bus)
    if json:
        print(msgspec.json.encode(found).decode())
    else:
        show(found, Console(highlight=False))
    return 0
