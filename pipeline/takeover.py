"""Take-over: what a dead worker held is placed again, at once.

    heartbeats            -> Fleet: who is alive
    claim chains (live)   -> Ledger: who holds which request
    every tick            -> dead worker: its requests are placed again as prefill tasks of the
                             next epoch, its own queues are moved to whoever lives
                             (pipeline/reaping.py)
                             past deadline: Expired on the chain
                             its bridge silent for the resume window, and not adopted by another
                             (pipeline/attendance.py): Cancelled on the chain
                             ended by somebody else: a quick word to the worker that computes

Any number of these may run at once, and each may be wrong: tasks carry the chain entry that they
build upon, so the claim decides. A restarted one reads the last entry of every chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from infra.bus import Bus, Msg
from infra.bus.names import TOKENS
from infra.bus.replay import replay
from infra.bus.wire import number_in
from infra.log import Logger
from infra.metrics import Metrics
from infra.pulse import set_or_pulse
from infra.task_scope import task_scope
from pipeline.attendance import ABANDONED, Attendance
from pipeline.claim_chain import ClaimChain
from pipeline.fleet import Fleet
from pipeline.ownership import Holding, Ledger
from pipeline.placement import Placement, PrefillPlace
from pipeline.presence import Presence
from pipeline.reaping import Reaper
from schemas import subjects
from schemas.codec import decode, encode, tag_of
from schemas.control import Adopt, Beat, CancelWord
from schemas.errors import BusUnavailable, MeshError, SchemaError
from schemas.headers import WorkHeaders
from schemas.prefill import PrefillTask
from schemas.tokens import (
    Cancelled,
    ChainEntry,
    Claim,
    Expired,
    StreamEnd,
    decode_chain_entry,
)

_HEARD_BEATS = 1.25  # beat intervals: a beat of each process, and some for the way
_REMEMBER_VERDICTS_S = 3600.0
_ENDED_PER_TICK = 64  # of a dead bridge's requests: the dead workers' are in more of a hurry
_OVERDUE_MS = 500  # later than the workers themselves: mostly they were faster


class TakeOver:
    """Watches workers and requests of the whole mesh.

    ``attendance`` is filled here, too.

    Args:
        fleet: filled here from heartbeats; placement reads it.
        placement: where requests are placed again. None: whoever pulls first.
        on_claim: called with each claim when it is made, by whomever.
        on_end: called with each request that ends, and the tokens of its answer, over all choices;
            None when it was cut off.
        on_stored: called with the last entry of each chain when all are read again.
        on_beat: called with each heartbeat, after the fleet has heard it.
    """

    def __init__(
        self,
        bus: Bus,
        chain: ClaimChain,
        fleet: Fleet,
        metrics: Metrics,
        log: Logger,
        *,
        placement: Placement | None = None,
        on_claim: Callable[[Claim], None] = lambda claim: None,
        on_end: Callable[[str, int | None], None] = lambda request_id, num_tokens: None,
        on_stored: Callable[[ChainEntry], None] = lambda entry: None,
        on_beat: Callable[[Beat], None] = lambda beat: None,
    ) -> None:
        self.ledger = Ledger()
        self.attendance = Attendance(bus.times.resume_window_s, time.monotonic())
        self._bus = bus
        self._chain = chain
        self._fleet = fleet
        self._next_roll_call_s = 0.0
        self._metrics = metrics
        self._log = log
        self._placement = placement
        self._on_claim = on_claim
        self._on_end = on_end
        self._on_stored = on_stored
        self._on_beat = on_beat
        self._placed: dict[str, int] = {}  # request -> the chain entry it was placed upon
        self._claimed_s: dict[str, float] = {}  # request -> when its present claim was heard
        self._reaper = Reaper(bus, fleet, log, holds=self._holds)
        self._must_read = True
        self._presence = Presence(bus, self._listen_anew)
        # (worker, request); what finds it full is not told: its chain says the same
        self._ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue(4096)
        self._someone_died = asyncio.Event()
        self._listening = asyncio.Event()
        self._listening_since_s = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        bus = self._bus
        beats = await bus.subscribe(subjects.ALL_BEATS, self._hear_beat)
        adoptions = await bus.subscribe(subjects.ALL_ADOPTIONS, self._hear_adopt)
        chains = await bus.subscribe(subjects.live(subjects.ALL_CHAINS), self._hear_chain)
        bus.on_reconnected.append(self._mark_stale)
        bus.on_error.append(self._on_error)
        self._mark_stale()  # what was said before was not heard
        self._listening_since_s = time.monotonic()
        self._listening.set()
        try:
            async with task_scope() as tasks:
                tasks.create_task(self._tell_workers(), name="cancel words")
                tasks.create_task(self._reaper.run(), name="reaper")
                tasks.create_task(self._presence.run(), name="presence")
                await self._tick_for_ever()
        finally:
            bus.on_reconnected.remove(self._mark_stale)
            bus.on_error.remove(self._on_error)
            await beats.unsubscribe()
            await adoptions.unsubscribe()
            await chains.unsubscribe()

    async def until_all_heard(self) -> None:
        """Wait until every live process has beaten since we began to listen. Whoever decides
        before takes a pool for one without workers, and puts all of its requests into the queue,
        where there is no order but that in which they came."""
        await self._listening.wait()
        until_s = self._listening_since_s + _HEARD_BEATS * self._bus.times.beat_s
        await asyncio.sleep(until_s - time.monotonic())

    # What is heard ---------------------------------------------------------------------------

    def _hear_beat(self, message: Msg) -> None:
        try:
            beat = decode(message.data, Beat)
        except SchemaError:
            return  # a newer peer's; its silence is then no verdict of ours on its requests
        self._fleet.hear(beat, time.monotonic())
        self.attendance.hear_beat(beat, time.monotonic())
        self._on_beat(beat)
        if beat.state == "gone":
            self._someone_died.set()

    def _hear_adopt(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # a newer peer's
            self.attendance.hear_adopt(decode(message.data, Adopt), time.monotonic())

    def _hear_chain(self, message: Msg) -> None:
        seq = number_in(message.header, b"\r\nNats-Sequence: ")
        if seq is not None:  # else not the stream's own word
            entry = self._apply(seq, message.subject, message.data)
            if isinstance(entry, Claim):
                self._on_claim(entry)
            elif entry is not None:
                num_tokens = sum(entry.num_tokens) if isinstance(entry, StreamEnd) else None
                self._on_end(entry.request_id, num_tokens)

    def _apply(self, seq: int, subject: str, data: bytes) -> ChainEntry | None:
        """Clients may write to their own chains: an entry counts for the request of its subject.

        Returns:
            The entry, if it counts.
        """
        try:
            entry = decode_chain_entry(data)
            reader, request_id = subjects.split_stream_subject(subject)
            subjects.check_reader(reader)
        except SchemaError:
            return None
        if entry.request_id != request_id:
            return None
        self._note(seq, reader, entry)
        return entry

    def _note(self, seq: int, reader: str, entry: ChainEntry) -> None:
        if isinstance(entry, Claim):
            before = self.ledger.get(entry.request_id)
            self.ledger.apply(seq, reader, entry)
            if self.ledger.get(entry.request_id) is not before:
                self._claimed_s[entry.request_id] = time.monotonic()
        elif (ended := self.ledger.apply(seq, reader, entry)) is not None:
            self._placed.pop(ended.request_id, None)
            self._claimed_s.pop(ended.request_id, None)
            if not isinstance(entry, StreamEnd) and not self._ended.full():
                self._ended.put_nowait((ended.claim.worker, ended.request_id))

    def _holds(self, worker: str) -> bool:
        return bool(self.ledger.held_by(worker))

    def _mark_stale(self) -> None:
        self._must_read = True
        self._listen_anew(time.monotonic())

    def _on_error(self, error: Exception) -> None:
        self._must_read = True  # a slow consumer: something was dropped

    async def _read_chains(self) -> None:
        """The last entry of every chain (from the beginning: an entry may have been missed)."""
        self._must_read = False
        chains = replay(self._bus, TOKENS, subjects.ALL_CHAINS, last_per_subject=True)
        async for message in chains:
            entry = self._apply(message.seq, message.subject, message.data)
            if entry is not None:
                self._on_stored(entry)

    def _listen_anew(self, now_s: float) -> None:
        self._fleet.listen_anew(now_s)
        self.attendance.listen_anew(now_s)

    # What is done ----------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            try:
                if self._bus.is_connected:
                    await self._tick()
            except MeshError as error:
                self._must_read = True
                self._log.warning("takeover_tick_failed", code=error.code, reason=error.message)
            # Who holds nothing leaves nothing that is in a hurry.
            looks_per_beat = 4 if len(self.ledger) else 2
            await set_or_pulse(self._someone_died, self._bus.times.beat_s / looks_per_beat)

    async def _tick(self) -> None:
        if self._must_read:
            await self._read_chains()
        self._presence.look()
        now_s = time.monotonic()
        self._fleet.judge(now_s)
        self._fleet.forget_verdicts(now_s - _REMEMBER_VERDICTS_S)
        if verdicts := self._fleet.take_verdicts():
            self._reaper.take(verdicts)
        for worker in self.ledger.workers():
            if self._fleet.is_dead(worker, now_s):
                for holding in self.ledger.held_by(worker):
                    if not self._is_fresh(holding, now_s):
                        await self._place_again(holding)
        for holding in self.ledger.overdue(self._bus.now_unix_ms() - _OVERDUE_MS):
            await self._end(holding, Expired(request_id=holding.request_id))
        if now_s >= self._next_roll_call_s:
            await self._end_abandoned(now_s)
        for role in ("prefill", "decode"):
            alive = sum(role in beat.roles for beat in self._fleet.members())
            self._metrics.live_workers.labels(role).set(alive)

    def _is_fresh(self, holding: Holding, now_s: float) -> bool:
        """Whether the claim itself is a sign of life: its worker made it just now, and before its
        first beat, or after we had given it up, which it does not know yet. It is left ``dead_s``
        to beat, to bring tokens, or to notice; else the same worker would take the request again
        and again, until that looked like poison."""
        heard_s = self._claimed_s.get(holding.request_id, -math.inf)
        died_s = self._fleet.died_s(holding.claim.worker)
        is_news = died_s is None or heard_s > died_s
        return is_news and now_s - heard_s < self._bus.times.dead_s

    async def _end_abandoned(self, now_s: float) -> None:
        """Requests whose bridge is dead, and which no other one reads."""
        self.attendance.forget(now_s)
        abandoned = self.attendance.abandoned(self.ledger.holdings(), now_s)
        for holding in abandoned[:_ENDED_PER_TICK]:
            self._log.warning(
                "request_abandoned", request_id=holding.request_id, reader=holding.reader
            )
            await self._end(holding, Cancelled(request_id=holding.request_id, reason=ABANDONED))
        if len(abandoned) <= _ENDED_PER_TICK:
            self._next_roll_call_s = now_s + self._bus.times.beat_s

    async def _end(self, holding: Holding, entry: Cancelled | Expired) -> None:
        tip = await self._chain.end(holding.reader, entry)
        if tip.entry is not None:
            self._note(tip.seq, holding.reader, tip.entry)

    async def _place_again(self, holding: Holding) -> None:
        """A prefill task of the next epoch: it finds the tokens that exist and goes on."""
        if self._placed.get(holding.request_id) == holding.seq:
            return
        claim, epoch = holding.claim, holding.claim.epoch + 1
        facts = {"request_id": holding.request_id, "epoch": epoch, "worker": claim.worker}
        place = await self._place(holding.request_id)
        task = PrefillTask(
            request_id=holding.request_id,
            epoch=epoch,
            after_seq=holding.seq,
            reader=holding.reader,
            kv_sources=place.sources,
        )
        try:
            await publish_prefill(
                self._bus,
                served=claim.served,
                task=task,
                deadline_unix_ms=claim.deadline_unix_ms,
                worker=place.worker,
            )
        except BusUnavailable:
            raise
        except MeshError as error:  # its queue is full, or its claim names none
            self._log.warning("request_not_placed", code=error.code, reason=error.message, **facts)
            if error.retryable:
                return
        else:
            self._metrics.takeovers.inc()
            self._log.warning("request_placed_again", role=claim.role, **facts)
        self._placed[holding.request_id] = holding.seq

    async def _place(self, request_id: str) -> PrefillPlace:
        """Where it is computed again, as admission would have it. While nobody is known to hold
        anything the record is not read for that."""
        found = None
        if self._placement is not None and self._placement.knows_prefixes:
            with contextlib.suppress(SchemaError):  # the worker that claims it says so
                found = await self._chain.record(request_id)
        if self._placement is None or found is None:
            return PrefillPlace(worker=subjects.ANY)
        return self._placement.place_prefill(found[1])

    async def _tell_workers(self) -> None:
        while True:
            worker, request_id = await self._ended.get()
            try:
                word = CancelWord(request_id=request_id)
                await self._bus.publish(subjects.cancel(worker), encode(word))
            except MeshError as error:
                self._log.warning("cancel_word_lost", worker=worker, reason=error.message)


async def publish_prefill(
    bus: Bus,
    *,
    served: str,
    task: PrefillTask,
    deadline_unix_ms: int,
    worker: str = subjects.ANY,
) -> None:
    """Place a request again, for one prefill worker, or whichever pulls first.

    Raises:
        BusUnavailable, QueueFull: not confirmed; to be tried again, which is harmless.
        SchemaError: ``served`` is no subject token.
    """
    headers = WorkHeaders(
        schema=tag_of(PrefillTask),
        request_id=task.request_id,
        epoch=task.epoch,
        deadline_unix_ms=deadline_unix_ms,
    )
    msg_id = f"{task.request_id}.prefill.{task.epoch}"
    await bus.publish_stored(
        subjects.prefill(served, worker), encode(task), headers.to_dict(), msg_id=msg_id
    )
