"""A worker process: one engine, one or two roles, one worker id at a time.

    Host          what lives as long as the process: engine and its thread, KV pool and its door
    Incarnation   what lives as long as a worker id: consumers, claims, running requests, leases

A worker that was frozen, or whose consumers were deleted, has been given up by the others. It
drops everything and comes back under a new id, with the model still loaded.
"""

from __future__ import annotations

import asyncio

from infra.config import WorkerConfig
from infra.process import RoleContext, find_nothing_out
from infra.task_scope import task_scope
from schemas.control import Beat
from workers.factory import build_engine
from workers.host import Host, running_host
from workers.incarnation import Incarnation
from workers.kv.disk import DiskPlan
from workers.own_profile import begin_with_own, named_profile


async def serve_worker(ctx: RoleContext, config: WorkerConfig) -> None:
    """Run until the process drains.

    Raises:
        ModelUnsupported: the model can't be loaded.
        EngineFailed: the engine broke; a new process is needed.
        ConfigError: UCX can't work at the address that it was given, or there is no profile of
            the name that it was given.
        BusUnavailable: such a profile can't be looked up.
    """
    profile = await named_profile(ctx.bus, config)
    engine, served = await asyncio.to_thread(build_engine, config, profile)
    if profile is None:
        await begin_with_own(ctx.bus, engine, served, config.threads, ctx.log)
    async with running_host(
        engine,
        served,
        ctx.process,
        ctx.metrics,
        ctx.log,
        evicted_share=config.kv_evicted_share,
        disk=DiskPlan.of(config),
        transports=config.transports,
    ) as host:
        await serve(ctx, config, host)


async def serve(ctx: RoleContext, config: WorkerConfig, host: Host) -> None:
    """Be one worker after the other until the process drains."""
    watch = host.readiness.watch(ctx.health, ctx.log, ctx.times, config.max_step_s)
    async with task_scope() as tasks:
        tasks.create_task(watch, name="readiness")
        ctx.ready()
        while not ctx.draining.is_set():
            incarnation = Incarnation(ctx, config, host)
            ctx.describe, ctx.before_beat = incarnation.describe, incarnation.measured
            ctx.health.changed.set()  # beat under the new id at once, before its first claim
            await incarnation.run()
            if host.readiness.is_engine_stuck and not ctx.draining.is_set():
                ctx.before_beat = find_nothing_out
                ctx.describe = _nobody  # the id is given up, and there is no other yet
                await host.readiness.until_engine_moves(ctx.draining, ctx.times)


def _nobody(beat: Beat) -> Beat:
    return beat
