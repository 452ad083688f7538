"""A process of many workers: ``mesh worker --crew FILE``.

    the process     one connection, one loop, one reader of other workers' pools, a beat of its own
    each worker     a process id, beats, an engine, a KV pool with its door, metrics
                    and worker ids of its own: to the rest of the mesh it is as if it were alone

A SIGTERM to the process, or an order to it, drains all of them; an order to one drains that one.
A SIGKILL takes them all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from infra.bus import Msg
from infra.config import WorkerConfig
from infra.health import Health
from infra.log import Logger
from infra.metrics import Metrics
from infra.process import RoleContext, beat_for_ever, new_process_id, say_beat
from infra.task_scope import task_scope
from infra.transport.handover import PoolReader
from schemas import subjects
from schemas.codec import decode
from schemas.control import Drain
from schemas.errors import SchemaError
from workers.crew.engines import CrewEngines
from workers.crew.figures import WorkerFigures, figures_of, write_for_ever
from workers.crew.plan import CrewWorker, read_crew
from workers.crew.pools import CommonReader
from workers.crew.steps import BookChecks, NotedClock, StepsOnLoop
from workers.host import running_host
from workers.service import serve


async def serve_crew(ctx: RoleContext, config: WorkerConfig) -> None:
    """Run all workers of ``config.crew`` until the process drains.

    Raises:
        ConfigError: the file can't be used.
        ModelUnsupported: the model can't be loaded.
        EngineFailed: an engine broke; a new process is needed.
    """
    assert config.crew is not None, "asked before"
    crew = read_crew(config.crew)
    engines = await asyncio.to_thread(CrewEngines, config)
    with CommonReader(ctx.times.beat_s) as pools:
        checks = BookChecks()
        members = [Member(ctx, config, worker, pools, checks) for worker in crew]
        async with task_scope() as helpers:
            if config.crew_figures is not None:
                figures = write_for_ever(
                    config.crew_figures, lambda: [member.figures() for member in members]
                )
                helpers.create_task(figures, name="figures")
            helpers.create_task(_drain_all(ctx, members), name="drain")
            helpers.create_task(_ready_when_all_are(ctx, members), name="ready")
            async with asyncio.TaskGroup() as tasks:
                for member in members:
                    tasks.create_task(member.run(engines), name=member.process)


class Member:
    """One worker of a crew."""

    def __init__(
        self,
        crew: RoleContext,
        config: WorkerConfig,
        worker: CrewWorker,
        pools: PoolReader,
        checks: BookChecks,
    ) -> None:
        self.process = new_process_id("worker", worker.name)
        self._worker = worker
        self._pools = pools
        self._checks = checks
        self._config = _config_of(config, worker)
        self._steps: StepsOnLoop | None = None
        self._log: Logger = crew.log.bind(process=self.process)
        self._ctx = RoleContext(
            process=self.process,
            kind="worker",
            bus=crew.bus,
            times=crew.times,
            health=Health(),
            metrics=Metrics(),
            log=self._log,
            health_port=crew.health_port,
            host=worker.host or crew.host,
        )
        self._ctx.health.set("worker", False, "starting")

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self._ctx.health.is_ready

    def drain(self) -> None:
        """Ask it to finish what it has and leave."""
        if not self._ctx.draining.is_set():
            self._ctx.drain()

    def figures(self) -> WorkerFigures:
        """What it has done."""
        late_s = 0.0 if self._steps is None else self._steps.late_s
        return figures_of(self._worker.name, self._worker.role, self._ctx.metrics, late_s)

    async def run(self, engines: CrewEngines) -> None:
        """Be a worker until drained.

        Raises:
            EngineFailed: its engine broke.
        """
        ctx = self._ctx
        orders = await ctx.bus.subscribe(subjects.control(self.process), self._hear_order)
        try:
            async with task_scope() as tasks, task_scope() as ctx.tasks:
                tasks.create_task(beat_for_ever(ctx), name="beats")
                clock = NotedClock()
                async with running_host(
                    engines.make(self._worker, clock),
                    engines.served,
                    self.process,
                    ctx.metrics,
                    self._log,
                    transports=self._config.transports,
                    pools=self._pools,
                    make_thread=self._make_steps(clock),
                ) as host:
                    await serve(ctx, self._config, host)
        finally:
            await say_beat(ctx, ctx.beat("gone"))
            await orders.unsubscribe()

    def _make_steps(self, clock: NotedClock) -> Callable[..., StepsOnLoop]:
        def make(*args: Any) -> StepsOnLoop:
            self._steps = StepsOnLoop(*args, clock=clock, checks=self._checks)
            return self._steps

        return make

    def _hear_order(self, message: Msg) -> None:
        try:
            order = decode(message.data, Drain)
        except SchemaError as error:
            self._log.warning("order_refused", reason=error.message)
            return
        if order.process == self.process:
            self._log.info("drain_started", cause="order")
            self.drain()


def _config_of(config: WorkerConfig, worker: CrewWorker) -> WorkerConfig:
    """The configuration that ``worker`` would have if it were alone."""
    return replace(
        config,
        crew=None,
        crew_figures=None,
        name=worker.name,
        role=worker.role,
        max_num_sequences=worker.max_num_sequences,
        max_batch_tokens=worker.max_batch_tokens,
        rack=worker.rack,
        zone=worker.zone,
        profile=None,
    )


async def _drain_all(ctx: RoleContext, members: list[Member]) -> None:
    await ctx.draining.wait()
    for member in members:
        member.drain()


async def _ready_when_all_are(ctx: RoleContext, members: list[Member]) -> None:
    """The process is ready once each of its workers has been."""
    waiting = set(members)
    while waiting:
        waiting = {member for member in waiting if not member.is_ready}
        await asyncio.sleep(ctx.times.beat_s / 8)
    ctx.ready()
    ctx.log.info("crew_ready", num_workers=len(members))
