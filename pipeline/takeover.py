"""Take-over: what a dead worker held is placed again, at once.

    heartbeats            -> Fleet: who is alive
    claim chains (live)   -> Ledger: who holds which request
    every tick            -> dead worker: its requests are placed again as prefill tasks of the
                             next epoch, its own queues are moved to whoever lives
                             past deadline: Expired on the chain
                             ended by somebody else: a quick word to the worker that computes

Any number of these may run at once, and each may be wrong: tasks carry the chain entry that they
build upon, so the claim decides. A restarted one reads the last entry of every chain.
"""

from __future__ import annotations

import asyncio
import time

from infra.bus import Bus, Msg, WorkMessage
from infra.bus.names import TOKENS
from infra.bus.reaper import Placement, next_attempt, reap, waiting_work
from infra.bus.replay import replay
from infra.log import Logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.fleet import Fleet
from pipeline.ownership import Holding, Ledger
from schemas import subjects
from schemas.codec import decode, encode, tag_of
from schemas.control import Beat, CancelWord
from schemas.errors import BusUnavailable, SchemaError
from schemas.headers import WorkHeaders
from schemas.prefill import PrefillTask
from schemas.tokens import Cancelled, Expired, StreamError, decode_chain_entry

_REMEMBER_VERDICTS_S = 3600.0


class TakeOver:
    """Watches workers and requests of the whole mesh.

    Args:
        fleet: filled here from heartbeats; placement reads it.
    """

    def __init__(
        self, bus: Bus, chain: ClaimChain, fleet: Fleet, metrics: Metrics, log: Logger
    ) -> None:
        self.ledger = Ledger()
        self._bus = bus
        self._chain = chain
        self._fleet = fleet
        self._metrics = metrics
        self._log = log
        self._placed: dict[str, int] = {}  # request -> the chain entry it was placed upon
        self._to_reap: list[Beat] = []
        self._must_read = True
        self._ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue(4096)  # (worker, request)
        self._someone_died = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        bus = self._bus
        await bus.subscribe(subjects.ALL_BEATS, self._hear_beat)
        await bus.subscribe(subjects.live(subjects.ALL_CHAINS), self._hear_chain)
        bus.on_reconnected.append(self._mark_stale)
        bus.on_error.append(self._on_error)
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._tell_workers(), name="cancel words")
                tasks.create_task(self._sweep_for_ever(), name="reaper")
                await self._tick_for_ever()
        finally:
            bus.on_reconnected.remove(self._mark_stale)
            bus.on_error.remove(self._on_error)

    # What is heard ---------------------------------------------------------------------------

    def _hear_beat(self, message: Msg) -> None:
        try:
            beat = decode(message.data, Beat)
        except SchemaError:
            return  # a newer peer's; its silence is then no verdict of ours on its requests
        self._fleet.hear(beat, time.monotonic())
        if beat.state == "gone":
            self._someone_died.set()

    def _hear_chain(self, message: Msg) -> None:
        headers = message.headers or {}
        self._apply(int(headers.get("Nats-Sequence", 0)), message.subject, message.data)

    def _apply(self, seq: int, subject: str, data: bytes) -> None:
        try:
            entry = decode_chain_entry(data)
            reader, _ = subjects.split_stream_subject(subject)
        except SchemaError:
            return
        ended = self.ledger.apply(seq, reader, entry)
        if ended is not None:
            self._placed.pop(ended.request_id, None)
            if isinstance(entry, Cancelled | Expired | StreamError) and not self._ended.full():
                self._ended.put_nowait((ended.claim.worker, ended.request_id))

    def _mark_stale(self) -> None:
        self._must_read = True
        self._fleet.listen_anew(time.monotonic())

    def _on_error(self, error: Exception) -> None:
        self._must_read = True  # a slow consumer: something was dropped

    async def _read_chains(self) -> None:
        """The last entry of every chain (from the beginning: an entry may have been missed)."""
        self._must_read = False
        chains = replay(self._bus, TOKENS, subjects.ALL_CHAINS, last_per_subject=True)
        async for message in chains:
            self._apply(message.seq, message.subject, message.data)

    # What is done ----------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        times = self._bus.times
        tick_s = times.beat_s / 4
        before_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if not self._bus.is_connected or now_s - before_s > times.dead_s / 2:
                self._fleet.listen_anew(now_s)  # who was away itself may not judge
            before_s = now_s
            try:
                await self._tick(now_s)
            except BusUnavailable as error:
                self._must_read = True
                self._log.warning("takeover_tick_failed", reason=error.message)
            try:
                async with asyncio.timeout(tick_s):
                    await self._someone_died.wait()
            except TimeoutError:
                continue
            self._someone_died.clear()

    async def _tick(self, now_s: float) -> None:
        if not self._bus.is_connected:
            return
        if self._must_read:
            await self._read_chains()
        self._fleet.judge(now_s)
        self._fleet.forget_verdicts(now_s - _REMEMBER_VERDICTS_S)
        self._to_reap += self._fleet.take_verdicts()
        for worker in self.ledger.workers():
            if self._fleet.is_dead(worker, now_s):
                for holding in self.ledger.held_by(worker):
                    await self._place_again(holding)
        while self._to_reap:
            await self._reap(self._to_reap[0])
            del self._to_reap[0]
        # Half a second later than the workers themselves: mostly they were faster.
        for holding in self.ledger.overdue(self._bus.now_unix_ms() - 500):
            tip = await self._chain.end(holding.reader, Expired(request_id=holding.request_id))
            if tip.entry is not None:
                self.ledger.apply(tip.seq, holding.reader, tip.entry)
        for role in ("prefill", "decode"):
            alive = sum(role in beat.roles for beat in self._fleet.members())
            self._metrics.live_workers.labels(role).set(alive)

    async def _place_again(self, holding: Holding) -> None:
        """A prefill task of the next epoch: it finds the tokens that exist and goes on."""
        if self._placed.get(holding.request_id) == holding.seq:
            return
        claim, epoch = holding.claim, holding.claim.epoch + 1
        await publish_prefill(
            self._bus,
            served=claim.served,
            task=PrefillTask(
                request_id=holding.request_id,
                epoch=epoch,
                after_seq=holding.seq,
                reader=holding.reader,
            ),
            deadline_unix_ms=claim.deadline_unix_ms,
        )
        self._placed[holding.request_id] = holding.seq
        self._metrics.takeovers.inc()
        self._log.warning(
            "request_placed_again",
            request_id=holding.request_id,
            epoch=epoch,
            worker=claim.worker,
            role=claim.role,
        )

    async def _tell_workers(self) -> None:
        while True:
            worker, request_id = await self._ended.get()
            try:
                word = CancelWord(request_id=request_id)
                await self._bus.publish(subjects.cancel(worker), encode(word))
            except BusUnavailable as error:
                self._log.warning("cancel_word_lost", worker=worker, reason=error.message)

    async def _reap(self, beat: Beat) -> None:
        """Fence a dead worker: its consumers go, so a frozen one learns that it was given up."""
        self._log.warning("worker_dead", worker=beat.worker, process=beat.process)
        for stage in beat.roles:
            await self._move_queue(stage, beat.served, beat.worker)

    async def _move_queue(self, stage: str, served: str, worker: str) -> None:
        shared = subjects.prefill(served) if stage == "prefill" else subjects.decode(served)

        def to_shared(message: WorkMessage) -> Placement:
            return Placement(
                subject=shared, data=message.data, headers=next_attempt(message.headers)
            )

        num_moved = await reap(self._bus, stage, served, worker, to_shared)
        if num_moved:
            self._log.warning("queue_moved", worker=worker, stage=stage, num_moved=num_moved)

    async def _sweep_for_ever(self) -> None:
        """Look for queues whose worker is dead: an old view may still have placed there."""
        while True:
            try:
                for subject in await waiting_work(self._bus):
                    stage, served, worker = subjects.split_work(subject)
                    named = worker if worker != subjects.ANY else None
                    if named and self._fleet.is_dead(named, time.monotonic()):
                        await self._move_queue(stage, served, named)
            except (BusUnavailable, SchemaError) as error:
                self._log.warning("sweep_failed", reason=error.message)
            await asyncio.sleep(4 * self._bus.times.beat_s)


async def publish_prefill(
    bus: Bus, *, served: str, task: PrefillTask, deadline_unix_ms: int
) -> None:
    """Place a request again, for whichever prefill worker pulls first.

    Raises:
        BusUnavailable: not confirmed; to be tried again, which is harmless.
    """
    headers = WorkHeaders(
        schema=tag_of(PrefillTask),
        request_id=task.request_id,
        epoch=task.epoch,
        deadline_unix_ms=deadline_unix_ms,
    )
    msg_id = f"{task.request_id}.prefill.{task.epoch}"
    await bus.publish_stored(
        subjects.prefill(served), encode(task), headers.to_dict(), msg_id=msg_id
    )
