"""A process with a body of the test's choice: ``one_role.py BODY URL DATA GRACE``."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from infra import process
from infra.config import BridgeConfig, BusConfig
from infra.process import RoleContext, run_process
from schemas.errors import ModelUnsupported


async def stay(ctx: RoleContext) -> None:
    """Serve, and drain when asked."""
    ctx.ready()
    await ctx.draining.wait()


async def linger(ctx: RoleContext) -> None:
    """A drain that does not end by itself."""
    await stay(ctx)
    await asyncio.Event().wait()


async def block(ctx: RoleContext) -> None:
    """A loop that no longer runs: nothing but the kernel can end it."""
    await stay(ctx)
    time.sleep(60)  # noqa: ASYNC251


async def refuse(ctx: RoleContext) -> None:
    """An error of ours."""
    raise ModelUnsupported("no such architecture", param="model")


async def crash(ctx: RoleContext) -> None:
    """A bug, in a helper of the body."""

    async def helper() -> None:
        raise ZeroDivisionError

    ctx.tasks.create_task(helper())
    await stay(ctx)


async def help_for_ever(ctx: RoleContext) -> None:
    """A body that leaves a helper behind."""

    async def helper() -> None:
        await asyncio.Event().wait()

    ctx.tasks.create_task(helper())
    await stay(ctx)


BODIES = {body.__name__: body for body in (stay, linger, block, refuse, crash, help_for_ever)}

if __name__ == "__main__":
    if sys.argv[1] != "block":
        process._HARD_EXIT_S = 30.0  # a busy machine: only what is stuck is for the kernel to end
    name, url, data, grace = sys.argv[1:]
    bus = BusConfig(nats_url=url, data=Path(data), time_scale=0.5)
    config = BridgeConfig(bus=bus, grace_s=float(grace))
    sys.exit(run_process("bridge", config, BODIES[name]))
