"""``mesh drain``: let one process finish what it has and leave."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infra.commands.operator import Config, Data, Nats, as_control, run, settings_of_mesh


def drain(
    name: Annotated[
        str, typer.Argument(help="worker id, process id, or the name in it: see 'mesh status'")
    ],
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds to wait for the end")] = 60.0,
    stay_down: Annotated[
        bool, typer.Option("--stay-down", help="'mesh up' is not to start it again")
    ] = False,
    nats: Nats = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Ask a worker, bridge or control process to drain, as SIGTERM does, and wait until it is gone.

    It takes nothing new, finishes or hands over what it has within its grace time, and keeps the
    KV that it has offered until that is read. Under 'mesh up' it is started again at once: drain
    one process after the other to restart them all, or give --stay-down.
    """

    async def work() -> int:
        from infra.drain import Drainer

        async with as_control(settings_of_mesh(nats, data, config), "drain") as bus:
            drainer = Drainer(bus, lambda line: print(line, file=sys.stderr, flush=True))
            await drainer.drain(name, stay_down=stay_down, timeout_s=timeout)
        return 0

    run("mesh drain", work())
