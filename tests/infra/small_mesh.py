"""A ``mesh`` whose roles only say that they are ready: what the supervisor needs, in half a second.

Run as a script: ``small_mesh.py up|control|worker|bridge|prepare …``. A model's source is a word
that tells a worker how to behave: ``good``, ``refused`` (fails at once with an error) or
``lingers`` (its drain does not end by itself).
"""

from __future__ import annotations

import asyncio
import sys

import typer

from infra.commands.up import ALSO
from infra.config import BridgeConfig, ControlConfig, UpConfig, WorkerConfig
from infra.console import UpConsole
from infra.failure import report
from infra.options import takes
from infra.process import RoleContext, run_process
from infra.supervisor import Supervisor
from schemas.errors import MeshError, ModelUnsupported

app = typer.Typer(pretty_exceptions_enable=False)


async def stay(ctx: RoleContext) -> None:
    ctx.ready()
    await ctx.draining.wait()


@takes(ControlConfig)
def control(config: ControlConfig) -> None:
    raise typer.Exit(run_process("control", config, stay))


@takes(BridgeConfig)
def bridge(config: BridgeConfig) -> None:
    raise typer.Exit(run_process("bridge", config, stay))


@takes(WorkerConfig)
def worker(config: WorkerConfig) -> None:
    async def body(ctx: RoleContext) -> None:
        if config.model.source == "refused":
            raise ModelUnsupported("no such architecture", param="model")
        await stay(ctx)
        if config.model.source == "lingers":
            await asyncio.Event().wait()

    raise typer.Exit(run_process("worker", config, body))


@app.command()
def prepare(source: str, model_cache: str = "", native_kernels: bool = False) -> None:
    if source == "missing":
        raise ModelUnsupported(f"{source}: no weights")
    print(f"looking into {model_cache}", file=sys.stderr)
    print(source)


@takes(UpConfig, also=ALSO)
def up(config: UpConfig) -> None:
    async def run() -> None:
        await Supervisor(config, UpConsole(), (sys.executable, __file__)).run()

    asyncio.run(run())


for command in (control, bridge, worker, up):
    app.command()(command)

if __name__ == "__main__":
    try:
        app()
    except MeshError as error:
        sys.exit(report("small_mesh", error))
