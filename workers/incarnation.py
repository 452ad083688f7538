"""What lives as long as a worker id: consumers, claims, running requests, leases.

    stages -> Prefill, Decode -> Claims -> Execution -> tokens
                                               |
                                               +------> Offers -> KvReady

It ends by a drain or by being fenced. In both cases the id is never used again, and the engine
holds nothing for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Any

import msgspec

from infra.bus import BeforeQueue, Bus, Msg, TokenWriter, any_consumer, worker_consumer
from infra.config import WorkerConfig
from infra.process import RoleContext
from infra.pulse import next_pulse
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.stage import Handler, Stage, StageContext, parse_as
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat, CancelWord, Load
from schemas.decode import DecodeTask
from schemas.errors import BusUnavailable, SchemaError
from schemas.prefill import PrefillTask
from schemas.tokens import Claim
from workers.claims import Claimed, Claims
from workers.decode import Decode
from workers.execution import Execution
from workers.host import Host
from workers.kv.borrowing import BusLenders
from workers.kv.event_publisher import EventPublisher
from workers.kv.handles import PoolFacts
from workers.kv.lending import Lending
from workers.kv.prefix import lent_tier
from workers.offers import Offers
from workers.prefill import Prefill, Prefix

_TOLD_S = 0.8  # of the grace time: when a drain gives back what has not ended
_FLUSHED_S = 0.05  # of it: for the tokens written by then
_GIVEN_BACK_S = 0.1  # of it: for the tasks that place requests again
_LEAST_NEWS_S = 0.05  # between two beats that come early
_ANSWER_S = 0.05  # that a beat waits for the engine to say how busy it is
_MAX_WAITING_PREFILLS = 16  # without a token so far: in the shared queue others may take them


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
        self._news = asyncio.Event()
        self._said = Load()  # with the last beat
        self._is_asked = asyncio.Event()  # how busy the engine is
        self._is_fresh = asyncio.Event()  # it has answered since
        self._measured_s = time.monotonic()
        self._ran_s = time.monotonic()  # when the watchdog was last seen to run
        info = host.engine.info
        metrics, log = ctx.metrics, ctx.log
        chain = ClaimChain(self._bus)
        self._claims = Claims(
            self._bus, chain, self.worker, log, on_settled=self._poke, may_claim=self._may_claim
        )
        self._writer = TokenWriter(self._bus)
        pool = PoolFacts(
            memory=host.engine.pool,
            fingerprint=info.fingerprint,
            addresses=host.links.addresses,
        )
        self._offers = Offers(
            self._bus, self._claims, self._writer, host.thread, pool, host.leases, metrics, log
        )
        self._lending = self._make_lending(pool)
        self._events = EventPublisher(self._bus, host.events, host.served, self.worker, log)
        self.execution = Execution(
            self._bus,
            self._claims,
            host.thread,
            self._writer,
            metrics,
            log,
            fingerprint=info.fingerprint,
            hand_over=self._offers.offer if config.role == "prefill" else None,
            on_room=self._poke,
        )
        self._stage_ctx = StageContext(
            bus=self._bus, chain=chain, metrics=ctx.metrics, log=ctx.log, process=ctx.process
        )
        self._stages = self._make_stages()

    def describe(self, beat: Beat) -> Beat:
        """Our facts in a heartbeat."""
        info = self._host.engine.info
        free = self._free_slots()
        age_ms = max(0.0, 1000 * (time.monotonic() - self._measured_s))
        load = msgspec.structs.replace(
            self._host.load, num_free_slots=max(0, free), age_ms=round(age_ms, 1)
        )
        self._show(load)
        self._said = load
        return msgspec.structs.replace(
            beat,
            worker=self.worker,
            roles=self._config.told_roles,
            served=self._host.served,
            engine=info.label,
            fingerprint=info.fingerprint,
            load=load,
            max_sequence_tokens=info.max_sequence_tokens,
            block_size=info.block_size,
            kv_seq=self._events.seq,
            costs=self._host.engine.meter.costs,
            profile=self._host.engine.meter.profile,
            kv_token_bytes=info.kv_token_bytes,
            rack=self._config.rack,
            zone=self._config.zone,
        )

    async def run(self) -> None:
        """Serve until drained or fenced; either way nothing is held afterwards."""
        log = self._ctx.log
        log.info("worker_started", worker=self.worker, served=self._host.served)
        self._host.listener = self.execution.on_report
        cancels = await self._bus.subscribe(subjects.cancel(self.worker), self._hear_cancel)
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._writer.run(), name="token writer")
                tasks.create_task(self.execution.run(), name="execution")
                tasks.create_task(self._offers.run(), name="offers")
                tasks.create_task(self._events.run(), name="kv events")
                if self._lending is not None:
                    tasks.create_task(self._lending.run(), name="lending")
                tasks.create_task(self._watch(), name="watchdog")
                tasks.create_task(self._audit_for_ever(), name="audit")
                tasks.create_task(self._measure(), name="load")
                tasks.create_task(self._tell_news(), name="news")
                stages = tasks.create_task(self._run_stages(), name="stages")
                await self._until_drained_or_fenced()
                if not self._fenced.is_set():
                    await self._drain(stages)
        finally:
            self.execution.drop_all()
            self._offers.end_all()
            if self._host.prefetch is not None:
                self._host.prefetch.let_all_go()
            log.info("worker_ended", worker=self.worker, fenced=self._fenced.is_set())
            await cancels.unsubscribe()

    # Prefixes --------------------------------------------------------------------------------

    def _make_lending(self, pool: PoolFacts) -> Lending | None:
        host, ctx = self._host, self._ctx
        tier = lent_tier(host.engine, host.tiers)
        if tier is None:
            return None
        return Lending(self._bus, self.worker, tier, pool, host.leases, ctx.metrics, ctx.log)

    def _prefix(self) -> Prefix | None:
        host = self._host
        if host.prefetch is None:
            return None
        fingerprint = host.engine.info.fingerprint
        lenders = BusLenders(self._bus, self.worker, fingerprint, self._ctx.log)
        return Prefix(prefetch=host.prefetch, lenders=lenders)

    # Stages ----------------------------------------------------------------------------------

    def _make_stages(self) -> list[Stage[Any]]:
        prefill = Prefill(self._bus, self._claims, self.execution, self._prefix())
        stages = self._queues("prefill", PrefillTask, prefill.handle, prefill.before_queue)
        if "prefill" not in self._config.roles:
            del stages[1:]  # only what a router leaves here: a short rest of what is here already
        if "decode" in self._config.roles:
            decode_handler = Decode(
                self._bus, self._claims, self.execution, self._host.intake, self._ctx.log
            )
            stages += self._queues("decode", DecodeTask, decode_handler.handle)
        return stages

    def _queues(
        self,
        name: str,
        kind: type[Any],
        handler: Handler[Any],
        before_queue: BeforeQueue | None = None,
    ) -> list[Stage[Any]]:
        """Our own queue, then the one that all workers of the model share."""
        served, times = self._host.served, self._bus.times
        own = worker_consumer(name, served, self.worker, times)
        direct = subjects.direct(subjects.prefill(served, self.worker)) if name == "prefill" else ""
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
                direct=direct if consumer is own else "",
                before_queue=before_queue,
                told_elsewhere=("claimed",),  # when it has been executed
            )
            for consumer in (own, any_consumer(name, served, times))
        ]

    async def _run_stages(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for stage in self._stages:
                tasks.create_task(stage.run())

    def _free_slots(self) -> int:
        """How many more sequences the engine would run: every one that is owed takes a place
        until it is held; so does every task that is being claimed."""
        if not self._host.readiness.is_able or not self._may_claim():
            return 0  # what one who has just woken pulls would wait for its ack's time to be over
        claiming = sum(stage.num_running for stage in self._stages)
        return self._config.max_num_sequences - self._num_busy - claiming

    def _free_prefills(self) -> int:
        """Prefill is bound by compute, not by slots: what waits here can't go elsewhere. Nor is
        there sense in more of it while decode workers don't come for what is held. What has a
        token here, and decodes, waits for nothing."""
        waiting = self._num_prompts + self._offers.num_waiting // 4
        return min(self._free_slots(), _MAX_WAITING_PREFILLS - waiting)

    @property
    def _num_prompts(self) -> int:
        """What waits for its first token here, or is being computed to it."""
        return self._num_busy - self.execution.num_decoding

    @property
    def _num_busy(self) -> int:
        return self._claims.num_choices - self._offers.num_choices

    def _poke(self) -> None:
        """There is room for another request."""
        self._changed.set()
        for stage in self._stages:
            stage.poke()
        said, has_prompts = self._said, self._num_prompts > 0
        if said.waiting_tokens and not has_prompts:
            self._host.load = msgspec.structs.replace(
                self._host.load, num_waiting=0, waiting_tokens=0, waiting_ms=0.0
            )
            self._measured_s = time.monotonic()
            self._news.set()
        elif not said.num_free_slots and self._free_slots() > 0:
            self._news.set()

    async def _tell_news(self) -> None:
        """Say at once that there is room again, or nothing left to compute, where the last beat
        said otherwise: routers would leave us idle until the next one."""
        while True:
            await self._news.wait()
            self._news.clear()
            self._ctx.health.changed.set()
            await asyncio.sleep(_LEAST_NEWS_S)

    # Life and death --------------------------------------------------------------------------

    def _fence(self) -> None:
        """Others have given us up."""
        if not self._fenced.is_set():
            self._ctx.log.warning("worker_fenced", worker=self.worker)
        self._fenced.set()
        self._changed.set()

    async def _watch(self) -> None:
        """Notice our own absence: who was silent for ``dead_s`` has been declared dead. With an
        engine that is stuck we are as good as absent."""
        while True:
            self._ran_s = time.monotonic()
            await next_pulse(self._bus.times.beat_s / 2)
            if not self._may_claim() or self._host.readiness.is_engine_stuck:
                self._fence()
            self._host.intake.prune()

    def _may_claim(self) -> bool:
        """Whether nobody can have given us up yet. Who has just woken may be asked this before
        the watchdog runs."""
        was_away = time.monotonic() - self._ran_s > self._bus.times.dead_s
        return not was_away and not self._fenced.is_set()

    async def _audit_for_ever(self) -> None:
        """Look at the chain of everything we compute, twice per lease: no word is needed for a
        request that ended, or went to another, to be dropped."""
        while True:
            await asyncio.sleep(self._bus.times.lease_s / 2)
            offered = {claimed.key for claimed in self._offers.waiting()}  # have their own clock
            for claimed in self._claims.owed():
                if claimed.key not in offered:
                    await self._check(claimed)

    async def _check(self, claimed: Claimed) -> None:
        """Drop a request that is not ours any more.

        One that runs and was claimed by another was taken from us: then all others were, too.
        """
        try:
            tip = await self._claims.tip(claimed)
        except BusUnavailable as error:
            self._ctx.log.info("claim_not_checked", reason=error.message)
            return
        if tip.seq == claimed.seq or not self._claims.owes(claimed):
            return
        if isinstance(tip.entry, Claim):
            if self.execution.runs(claimed):
                self._fence()
        else:
            self._ctx.log.info("request_dropped", request_id=claimed.record.request_id)
            self.execution.drop(claimed)
            self._offers.drop(claimed)
            self._claims.settle(claimed)

    async def measured(self) -> None:
        """Let the engine be asked how busy it is, and wait for its answer; not for long: it answers
        between two steps, and a beat says how old it is."""
        self._is_fresh.clear()
        self._is_asked.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_ANSWER_S, self._bus.times.beat_s / 4)):
                await self._is_fresh.wait()

    async def _measure(self) -> None:
        """Ask the engine how busy it is, whenever a beat is due, or nobody has beaten for so long.
        An idle one with whose blocks nothing has happened is left alone: it checks its books after
        a second of peace."""
        num_seen, tally = -1, self._host.tiers.tally
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._bus.times.beat_s):
                    await self._is_asked.wait()
            self._is_asked.clear()
            load = self._host.load
            is_empty = load.num_blocks and load.num_blocks == load.num_free_blocks
            is_idle = is_empty and not load.num_waiting and not self._claims.num_owed
            if is_idle and tally.total == num_seen:
                self._measured_s = time.monotonic()
                self._is_fresh.set()
            else:
                num_seen = tally.total
                await self._ask_engine()
            await self._learn()

    async def _ask_engine(self) -> None:
        with contextlib.suppress(TimeoutError):  # a long step; the watchdog knows when too long
            async with asyncio.timeout(self._config.max_step_s):
                self._host.load, self._host.blocks = await self._host.thread.call(
                    lambda engine: (engine.load(), engine.block_states())
                )
                self._measured_s = time.monotonic()
                self._is_fresh.set()

    async def _learn(self) -> None:
        """What the engine's steps cost, when it has made some. Beside the loop: it takes as long as
        a step or two."""
        meter = self._host.engine.meter
        if meter.is_due:
            await asyncio.to_thread(meter.learn)

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
        """Take nothing more, finish what runs, keep leases until they are read, and lend until
        then; what is left near the end of the grace time is given back for others to go on with."""
        for stage in self._stages:
            stage.stop()
        grace_s = self._config.grace_s
        try:
            async with asyncio.timeout(_TOLD_S * grace_s):
                await stages
                while self._claims.num_owed and not self._fenced.is_set():
                    self._changed.clear()
                    await self._changed.wait()
                if self._lending is not None and not self._fenced.is_set():
                    await self._lending.leave()
        except TimeoutError:
            self.execution.drop_all()
            await self._flush(_FLUSHED_S * grace_s)
            await self._give_back_all(_GIVEN_BACK_S * grace_s)
        else:
            await self._flush(_FLUSHED_S * grace_s)

    async def _flush(self, timeout_s: float) -> None:
        try:
            await self._writer.flush(timeout_s)
        except BusUnavailable as error:
            self._ctx.log.warning("drain_left_tokens", reason=error.message)

    async def _give_back_all(self, timeout_s: float) -> None:
        """What can't be given back in time is found by the router, once we are gone."""
        left = self._claims.owed()
        self._ctx.log.warning("drain_gave_back", num_requests=len(left))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                for claimed in left:
                    tasks.create_task(self._claims.give_back(claimed, "drained"))

    def _hear_cancel(self, message: Msg) -> None:
        """The word only hurries us; the chain decides."""
        try:
            word = decode(message.data, CancelWord)
        except SchemaError as error:
            self._ctx.log.warning("cancel_refused", reason=error.message)
            return
        for claimed in self._claims.owed():
            if claimed.record.request_id == word.request_id:
                self.execution.spawn(self._check(claimed), f"cancel {claimed.key}")

    def _show(self, load: Load) -> None:
        metrics = self._ctx.metrics
        metrics.sequences.labels("running").set(load.num_running)
        metrics.sequences.labels("waiting").set(load.num_waiting)
        for part, pace in self._host.engine.meter.pace.items():
            metrics.step_pace.labels(part).set(pace)
        self._host.tiers.show(metrics, self._host.blocks)
