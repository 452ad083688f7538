"""A worker process: one engine, one or two roles, one worker id at a time.

    Host          what lives as long as the process: engine and its thread, KV pool and its door
    Incarnation   what lives as long as a worker id: consumers, claims, running requests, leases

A worker that was frozen, or whose consumers were deleted, has been given up by the others. It
drops everything and comes back under a new id, with the model still loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from infra.bus import Bus, Msg, TokenWriter, any_consumer, worker_consumer
from infra.config import WorkerConfig
from infra.process import RoleContext
from infra.task_scope import task_scope
from infra.transport.handover import PoolDoor, PoolReader
from pipeline.claim_chain import ClaimChain
from pipeline.stage import Handler, Stage, StageContext, parse_as
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat, CancelWord, Load
from schemas.decode import DecodeTask
from schemas.errors import BusUnavailable, EngineFailed, SchemaError
from schemas.prefill import PrefillTask
from workers.claims import Claimed, Claims
from workers.decode import Decode
from workers.engine.api import StepReport
from workers.engine.engine import Engine
from workers.engine.thread import EngineThread
from workers.execution import Execution
from workers.factory import build_engine
from workers.kv.leases import LeaseBook
from workers.offers import Offers, PoolFacts
from workers.prefill import Prefill

STUCK_S = 60.0  # a step that takes longer than this is not coming back
_MAX_WAITING_PREFILLS = 16  # taken beyond the running batch: the shared queue balances better


@dataclass(slots=True, kw_only=True)
class Host:
    """The process's engine and memory."""

    engine: Engine
    thread: EngineThread
    served: str
    leases: LeaseBook
    door: PoolDoor
    reader: PoolReader
    load: Load = field(default_factory=Load)
    incarnation: Incarnation | None = None

    def on_report(self, report: StepReport) -> None:
        """Reports go to whoever is the worker now."""
        if self.incarnation is not None:
            self.incarnation.execution.on_report(report)


async def serve_worker(ctx: RoleContext, config: WorkerConfig) -> None:
    """Run until the process drains.

    Raises:
        ModelUnsupported: the model can't be loaded.
        EngineFailed: the engine broke; a new process is needed.
    """
    async with _host(ctx, config) as host:
        ctx.ready()
        while not ctx.draining.is_set():
            incarnation = Incarnation(ctx, config, host)
            host.incarnation = incarnation
            ctx.describe = incarnation.describe
            await incarnation.run()


@asynccontextmanager
async def _host(ctx: RoleContext, config: WorkerConfig) -> AsyncIterator[Host]:
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_fatal(error: Exception) -> None:
        if not broken.done():
            broken.set_exception(EngineFailed(f"the engine broke: {error}"))

    engine, served = await asyncio.to_thread(build_engine, config)
    leases = LeaseBook()
    host = Host(
        engine=engine,
        thread=EngineThread(engine, lambda report: host.on_report(report), on_fatal),
        served=served,
        leases=leases,
        door=PoolDoor(engine.pool, ctx.process, leases.may_read, ctx.log),
        reader=PoolReader(),
    )
    host.thread.start()
    try:
        async with task_scope() as tasks:
            tasks.create_task(_raise_when(broken), name="engine")
            tasks.create_task(host.door.run(), name="kv door")
            yield host
    finally:
        await host.thread.stop()
        broken.cancel()
        host.reader.close()
        engine.pool.close()


async def _raise_when(broken: asyncio.Future[None]) -> None:
    await broken


def _reader_of(task: PrefillTask | DecodeTask) -> str:
    return task.reader


class Incarnation:
    """One worker id at work."""

    def __init__(self, ctx: RoleContext, config: WorkerConfig, host: Host) -> None:
        self.worker = f"{config.name}-{secrets.token_hex(5)}"
        self._ctx = ctx
        self._config = config
        self._host = host
        self._bus: Bus = ctx.bus
        self._fenced = asyncio.Event()
        self._changed = asyncio.Event()
        info = host.engine.info
        chain = ClaimChain(self._bus)
        self._claims = Claims(self._bus, chain, self.worker, ctx.log)
        self._writer = TokenWriter(self._bus)
        self._offers = Offers(
            self._bus,
            self._claims,
            self._writer,
            PoolFacts(
                memory=host.engine.pool,
                fingerprint=info.fingerprint,
                addresses=(host.door.address,),
            ),
            host.leases,
            ctx.metrics,
            ctx.log,
            on_end=self._poke,
        )
        self.execution = Execution(
            self._bus,
            self._claims,
            host.thread,
            self._writer,
            ctx.metrics,
            ctx.log,
            fingerprint=info.fingerprint,
            hand_over=None if config.role == "both" else self._offers.offer,
            on_capacity=self._poke,
        )
        self._offers.attach(self.execution)
        self._stage_ctx = StageContext(
            bus=self._bus, chain=chain, metrics=ctx.metrics, log=ctx.log, process=ctx.process
        )
        self._stages = self._make_stages()

    def describe(self, beat: Beat) -> Beat:
        """Our facts in a heartbeat."""
        info = self._host.engine.info
        free = self._free_slots()
        load = msgspec.structs.replace(self._host.load, num_free_slots=max(0, free))
        self._show(load)
        return msgspec.structs.replace(
            beat,
            worker=self.worker,
            roles=self._config.roles,
            served=self._host.served,
            engine=info.kind,
            fingerprint=info.fingerprint,
            load=load,
        )

    async def run(self) -> None:
        """Serve until drained or fenced; either way nothing is held afterwards."""
        log = self._ctx.log
        log.info("worker_started", worker=self.worker, served=self._host.served)
        cancels = await self._bus.subscribe(subjects.cancel(self.worker), self._hear_cancel)
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._writer.run(), name="token writer")
                tasks.create_task(self.execution.run(), name="execution")
                tasks.create_task(self._offers.run(), name="offers")
                tasks.create_task(self._watch(), name="watchdog")
                tasks.create_task(self._measure(), name="load")
                stages = tasks.create_task(self._run_stages(), name="stages")
                await self._until_drained_or_fenced()
                if not self._fenced.is_set():
                    await self._drain(stages)
        finally:
            await cancels.unsubscribe()
            for claimed in self.execution.running():
                self.execution.drop(claimed)
            self._offers.end_all()
            log.info("worker_ended", worker=self.worker, fenced=self._fenced.is_set())

    # Stages ----------------------------------------------------------------------------------

    def _make_stages(self) -> list[Stage[Any]]:
        host = self._host
        stages: list[Stage[Any]] = []
        if "prefill" in self._config.roles:
            prefill = Prefill(self._claims, self.execution)
            stages += self._both_queues("prefill", PrefillTask, prefill.handle)
        if "decode" in self._config.roles:
            decode_handler = Decode(
                self._bus,
                self._claims,
                self.execution,
                host.thread,
                host.engine.pool,
                host.engine.info.fingerprint,
                host.reader,
                self._ctx.metrics,
                self._ctx.log,
            )
            stages += self._both_queues("decode", DecodeTask, decode_handler.handle)
        return stages

    def _both_queues(self, name: str, kind: type[Any], handler: Handler[Any]) -> list[Stage[Any]]:
        """Our own queue, and the one that all workers of the model share."""
        served, times = self._host.served, self._bus.times
        own = worker_consumer(name, served, self.worker, times)
        return [
            Stage(
                self._stage_ctx,
                name,
                consumer,
                parse_as(kind),
                _reader_of,
                handler,
                capacity=self._free_prefills if name == "prefill" else self._free_slots,
                on_fenced=self._fence if consumer is own else None,
            )
            for consumer in (own, any_consumer(name, served, times))
        ]

    async def _run_stages(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for stage in self._stages:
                tasks.create_task(stage.run())

    def _free_slots(self) -> int:
        busy = self.execution.num_running + sum(stage.num_running for stage in self._stages)
        return self._config.max_num_sequences - busy

    def _free_prefills(self) -> int:
        """Prefill is bound by compute, not by slots: what waits here can't go elsewhere."""
        waiting = self.execution.num_running + self._offers.num_waiting // 4
        return min(self._free_slots(), _MAX_WAITING_PREFILLS - waiting)

    def _poke(self) -> None:
        """A request left."""
        self._changed.set()
        for stage in self._stages:
            stage.poke()

    # Life and death --------------------------------------------------------------------------

    def _fence(self) -> None:
        """Others have given us up."""
        self._ctx.log.warning("worker_fenced", worker=self.worker)
        self._fenced.set()

    async def _watch(self) -> None:
        """Notice our own absence: who was silent for ``dead_s`` has been declared dead."""
        times = self._bus.times
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(times.beat_s / 2)
            now_s = time.monotonic()
            if now_s - before_s > times.dead_s:
                self._fence()
            before_s = now_s
            stuck = self._host.thread.is_stuck(STUCK_S)
            self._ctx.health.set("engine", not stuck, f"no step ended for {STUCK_S:.0f} s")
            self._host.reader.prune()

    async def _measure(self) -> None:
        """Ask the engine how busy it is, between its steps."""
        while True:
            await asyncio.sleep(self._bus.times.beat_s / 2)
            with contextlib.suppress(TimeoutError):  # a long step; the watchdog knows when too long
                async with asyncio.timeout(STUCK_S):
                    self._host.load = await self._host.thread.call(lambda engine: engine.load())

    async def _until_drained_or_fenced(self) -> None:
        async with task_scope() as tasks:
            first = asyncio.Event()

            async def follow(event: asyncio.Event) -> None:
                await event.wait()
                first.set()

            tasks.create_task(follow(self._ctx.draining))
            tasks.create_task(follow(self._fenced))
            await first.wait()

    async def _drain(self, stages: asyncio.Task[None]) -> None:
        """Take nothing more, finish what runs, keep leases until they are read; what is left
        near the end of the grace time is given back for others to go on with."""
        for stage in self._stages:
            stage.stop()
        grace_s = self._config.grace_s * 0.8
        try:
            async with asyncio.timeout(grace_s):
                await stages
                while self.execution.num_running or self._offers.num_waiting:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            left = self.execution.running() + self._offers.waiting()
            self._ctx.log.warning("drain_gave_back", num_requests=len(left))
            for claimed in left:
                self.execution.drop(claimed)
                await self._claims.give_back(claimed, "drained")
        await self._flush()

    async def _flush(self) -> None:
        try:
            await self._writer.flush(self._bus.times.dead_s)
        except BusUnavailable as error:
            self._ctx.log.warning("drain_left_tokens", reason=error.message)

    def _hear_cancel(self, message: Msg) -> None:
        try:
            word = decode(message.data, CancelWord)
        except SchemaError as error:
            self._ctx.log.warning("cancel_refused", reason=error.message)
            return
        for claimed in self.execution.running():
            if claimed.record.request_id == word.request_id:
                self.execution.spawn(self._cancel(claimed), f"cancel {claimed.key}")

    async def _cancel(self, claimed: Claimed) -> None:
        """The word only hurries us; the chain decides."""
        try:
            if not await self._claims.still_ours(claimed):
                self.execution.drop(claimed)
                self._ctx.log.info("request_dropped", request_id=claimed.record.request_id)
        except BusUnavailable as error:
            self._ctx.log.info("cancel_not_checked", reason=error.message)

    def _show(self, load: Load) -> None:
        metrics = self._ctx.metrics
        metrics.sequences.labels("running").set(load.num_running)
        metrics.sequences.labels("waiting").set(load.num_waiting)
        metrics.kv_blocks.labels("free").set(load.num_free_blocks)
        metrics.kv_blocks.labels("used").set(load.num_blocks - load.num_free_blocks)
