"""A worker process: one engine, one or two roles, one worker id at a time.

    Host          what lives as long as the process: engine and its thread, KV pool and its door
    Incarnation   what lives as long as a worker id: consumers, claims, running requests, leases

A worker that was frozen, or whose consumers were deleted, has been given up by the others. It
drops everything and comes back under a new id, with the model still loaded.
"""

from __future__ import annotations

import asyncio

from infra.config import WorkerConfig
from infra.process import RoleContext
from workers.factory import build_engine
from workers.host import Host, running_host
from workers.incarnation import Incarnation


async def serve_worker(ctx: RoleContext, config: WorkerConfig) -> None:
    """Run until the process drains.

    Raises:
        ModelUnsupported: the model can't be loaded.
        EngineFailed: the engine broke; a new process is needed.
    """
    engine, served = await asyncio.to_thread(build_engine, config)
    async with running_host(engine, served, ctx.process, ctx.metrics, ctx.log) as host:
        await serve(ctx, config, host)


async def serve(ctx: RoleContext, config: WorkerConfig, host: Host) -> None:
    """Be one worker after the other until the process drains."""
    ctx.ready()
    while not ctx.draining.is_set():
        incarnation = Incarnation(ctx, config, host)
        ctx.describe = incarnation.describe
        await incarnation.run()
