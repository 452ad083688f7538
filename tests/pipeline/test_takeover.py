"""Workers here are nothing but claims and beats: what take-over knows of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from infra.bus import (
    WORK,
    Bus,
    EmbeddedBroker,
    Limits,
    WorkPull,
    ensure_topology,
    waiting_work,
    worker_consumer,
)
from infra.bus.topology import ensure_consumer
from infra.log import make_logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from infra.times import Times
from pipeline.claim_chain import ClaimChain
from pipeline.fleet import Fleet
from pipeline.placement import PrefillPlace
from pipeline.prefix_walk import Found
from pipeline.takeover import TakeOver
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import CancelWord
from schemas.decode import DecodeTask
from schemas.kv import KvSource
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Cancelled, Claim, Expired
from tests.conftest import Connect, Until
from tests.freezing import freeze
from tests.pipeline.rig import (
    READER,
    SERVED,
    Ear,
    LogLines,
    beat,
    claim,
    kv_ready,
    new_id,
    prefill_task,
    record,
    send,
    store,
    stream_end,
)

SHARED = subjects.prefill(SERVED)
SOURCES = (KvSource(worker="w3", num_blocks=7, tier="host"),)


@pytest.fixture(scope="session")
def times() -> Times:
    """A tenth of the real ones: beats of 50 ms, dead after 150 ms."""
    return Times().scaled(0.1)


@dataclass(slots=True)
class Watch:
    """Take-over at work, and workers made of beats."""

    bus: Bus
    ear: Ear
    until: Until
    tasks: asyncio.TaskGroup
    lines: LogLines = field(default_factory=LogLines)
    metrics: Metrics = field(default_factory=Metrics)
    beating: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(
        self, bus: Bus | None = None, dead_s: float | None = None, **more: Any
    ) -> tuple[TakeOver, asyncio.Task[None]]:
        """One more take-over; returns when it has read the chains."""
        bus = bus or self.bus
        fleet = Fleet(dead_s or bus.times.dead_s, time.monotonic())
        log = make_logger("test", stream=self.lines.stream)
        takeover = TakeOver(bus, ClaimChain(bus), fleet, self.metrics, log, **more)
        task = self.tasks.create_task(takeover.run())
        await self.until(lambda: not takeover._must_read)
        return takeover, task

    def worker(self, worker: str, **facts: Any) -> None:
        """A worker that lives until it is silenced."""
        self.beating[worker] = self.tasks.create_task(self._beat(worker, facts))

    async def _beat(self, worker: str, facts: dict[str, Any]) -> None:
        while True:
            await self.say(worker, **facts)
            await asyncio.sleep(self.bus.times.beat_s / 2)

    async def say(self, worker: str, **facts: Any) -> None:
        one = beat(worker, **facts)
        if self.bus.is_connected:
            await self.bus.publish(subjects.beat(one.process), encode(one))

    def silence(self, worker: str) -> None:
        """Killed or frozen: the difference is not to be seen."""
        self.beating.pop(worker).cancel()

    async def claims(self, worker: str, request_id: str = "", **facts: Any) -> tuple[str, int]:
        """A new request that ``worker`` has claimed; its id and the claim's sequence."""
        request_id = request_id or new_id()
        seq = await self.append(claim(request_id, worker, **facts))
        return request_id, seq

    async def append(self, entry: Claim | Cancelled | Expired, after_seq: int | None = None) -> int:
        chain = ClaimChain(self.bus)
        if after_seq is None:
            after_seq = (await chain.tip(READER, entry.request_id)).seq
        seq = await chain.append(READER, entry, after_seq)
        assert seq is not None
        return seq

    def placed(self, request_id: str) -> list[tuple[str, PrefillTask]]:
        return self.ear.prefill_tasks(request_id)

    async def ticks(self, count: int = 3) -> None:
        """Let take-over look around a few times more."""
        await asyncio.sleep(count * self.bus.times.beat_s)


@pytest_asyncio.fixture
async def watch(bus: Bus, ear: Ear, until: Until) -> AsyncIterator[Watch]:
    async with task_scope() as tasks:
        yield Watch(bus, ear, until, tasks)


# Who begins to listen --------------------------------------------------------------------------


async def test_who_begins_to_listen_waits_for_a_beat_of_everybody(
    watch: Watch, broker: EmbeddedBroker
) -> None:
    """A whole interval, for one may have beaten right before; and no longer than that. Before it
    listens, it waits."""
    bus = await Bus.connect(broker.url("control"), role="control", times=Times())
    fleet = Fleet(bus.times.dead_s, time.monotonic())
    log = make_logger("test", stream=watch.lines.stream)
    takeover = TakeOver(bus, ClaimChain(bus), fleet, watch.metrics, log)
    waiting = watch.tasks.create_task(takeover.until_all_heard())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    began_s = time.monotonic()
    listening = watch.tasks.create_task(takeover.run())
    await watch.until(lambda: not takeover._must_read)
    assert fleet.members() == []
    watch.worker("w1")
    await waiting
    assert time.monotonic() - began_s > bus.times.beat_s
    assert [one.worker for one in fleet.members()] == ["w1"]
    async with asyncio.timeout(bus.times.beat_s / 2):
        await takeover.until_all_heard()  # they have been, long ago
    listening.cancel()
    await asyncio.wait([listening])
    await bus.close()


# Workers that fall silent ---------------------------------------------------------------------


async def test_what_a_silent_worker_held_is_placed_again_once(watch: Watch) -> None:
    """For the next epoch, on top of its claim, for whoever pulls first; a live one keeps its."""
    await watch.start()
    watch.worker("w1")
    watch.worker("w2")
    (lost, seq), (kept, _) = await watch.claims("w1"), await watch.claims("w2")
    await watch.ticks(4)
    assert watch.placed(lost) == []
    watch.silence("w1")
    await watch.until(lambda: watch.placed(lost))
    await watch.ticks()
    ((subject, task),) = watch.placed(lost)
    assert subject == SHARED
    assert task == PrefillTask(request_id=lost, epoch=2, after_seq=seq, reader=READER)
    assert watch.placed(kept) == []
    assert watch.metrics.takeovers._value.get() == 1


class Holders:
    """A placement that knows who holds everybody's prompt."""

    def __init__(self) -> None:
        self.knows_prefixes = True
        self.asked: list[str] = []

    def place_prefill(
        self, record: RequestRecord, *, hurries: bool = False, found: Found | None = None
    ) -> PrefillPlace:
        self.asked.append(record.request_id)
        return PrefillPlace(worker="w2", sources=SOURCES)


async def test_who_holds_the_prompt_gets_it_again(watch: Watch) -> None:
    """Placed as admission would, by the record; without one, and while nobody is known to hold
    anything, whoever pulls first has it."""
    holders = Holders()
    await watch.start(placement=holders)
    watch.worker("w1")
    (known, _), (unknown, _) = await watch.claims("w1"), await watch.claims("w1")
    await store(watch.bus, subjects.request_record(known), record(known))
    watch.silence("w1")
    await watch.until(lambda: watch.placed(known) and watch.placed(unknown))
    ((subject, task),) = watch.placed(known)[:1]
    assert (subject, task.kv_sources) == (subjects.prefill(SERVED, "w2"), SOURCES)
    ((subject, task),) = watch.placed(unknown)
    assert (subject, task.kv_sources) == (SHARED, ())
    assert holders.asked == [known]
    holders.knows_prefixes = False
    watch.worker("w3")
    late, _ = await watch.claims("w3")
    await store(watch.bus, subjects.request_record(late), record(late))
    watch.silence("w3")
    await watch.until(lambda: watch.placed(late))
    assert watch.placed(late)[0][0] == SHARED
    assert holders.asked == [known]


async def test_each_claim_is_placed_again_by_itself(watch: Watch) -> None:
    """Who takes it over may die as well: one task per entry of the chain, each an epoch on."""
    await watch.start()
    request_id, seq = new_id(), 0
    expected = []
    for epoch in (1, 2, 3):
        watch.worker(f"w{epoch}")
        seq = await watch.append(claim(request_id, f"w{epoch}", epoch=epoch), seq)
        watch.silence(f"w{epoch}")
        expected.append((epoch + 1, seq))
        await watch.until(lambda: len(watch.placed(request_id)) == len(expected))
    await watch.ticks()
    assert [(task.epoch, task.after_seq) for _, task in watch.placed(request_id)] == expected


async def test_gone_is_taken_over_at_once(watch: Watch) -> None:
    """A worker that says it goes is not waited for, and what has ended is not placed."""
    await watch.start(dead_s=300.0)
    await watch.say("w1")
    (open_one, _), (ended, _) = await watch.claims("w1"), await watch.claims("w1")
    await watch.append(stream_end(ended, 1, 4))
    await watch.say("w1", state="gone")
    await watch.until(lambda: watch.placed(open_one))
    await watch.ticks()
    assert watch.placed(ended) == []


async def test_two_of_them_place_one_task(watch: Watch, connect: Connect) -> None:
    """Both judge alike and say it under one message id: the queue holds one task."""
    await watch.start()
    await watch.start(await connect("control", name="second"))
    watch.worker("w1")
    request_id, _ = await watch.claims("w1")
    watch.silence("w1")
    await watch.until(lambda: len(watch.placed(request_id)) == 2)
    await watch.ticks()
    assert len(watch.placed(request_id)) == 2
    assert await waiting_work(watch.bus) == {SHARED: 1}


# One that starts anew, or was away ------------------------------------------------------------


async def test_a_restarted_one_knows_from_the_chains(watch: Watch) -> None:
    """It was not there when the request was claimed, nor when its worker died."""
    watch.worker("alive")
    (lost, seq), (kept, _) = await watch.claims("w1"), await watch.claims("alive")
    (ended, _) = await watch.claims("w1")
    await watch.append(Cancelled(request_id=ended))
    await watch.start()
    await watch.until(lambda: watch.placed(lost))
    await watch.ticks()
    assert [task.after_seq for _, task in watch.placed(lost)] == [seq]
    assert watch.placed(kept) == watch.placed(ended) == []


async def test_one_that_starts_listens_before_it_judges(watch: Watch, times: Times) -> None:
    """Its process loaded models for long before: that was no silence of the workers."""
    request_id, _ = await watch.claims("w1")
    log = make_logger("test", stream=watch.lines.stream)
    fleet = Fleet(times.dead_s, time.monotonic() - 60)
    takeover = TakeOver(watch.bus, ClaimChain(watch.bus), fleet, watch.metrics, log)
    watch.tasks.create_task(takeover.run())
    await watch.until(lambda: len(takeover.ledger) == 1)
    await watch.ticks(1)  # judged already, and the worker's next beat is still to come
    watch.worker("w1")
    await watch.ticks(5)
    assert watch.placed(request_id) == []


async def test_one_that_was_frozen_judges_nobody(watch: Watch) -> None:
    """Everything stood still, the workers too: when it goes on nobody is dead."""
    takeover, _ = await watch.start()
    watch.worker("w1")
    request_id, _ = await watch.claims("w1")
    await watch.until(lambda: len(takeover.ledger) == 1)
    time.sleep(4 * watch.bus.times.dead_s)  # noqa: ASYNC251 - the whole process stands still
    await watch.ticks(5)
    assert watch.placed(request_id) == []
    assert watch.lines.events("worker_dead") == []


async def test_an_outage_is_nobodys_death(
    watch: Watch, broker: EmbeddedBroker, until: Until
) -> None:
    """While the broker is away nobody is heard; afterwards the silent one is still found."""
    takeover, task = await watch.start()
    watch.worker("w1")
    watch.worker("w2")
    (kept, _), (lost, _) = await watch.claims("w1"), await watch.claims("w2")
    await until(lambda: len(takeover.ledger) == 2)
    await broker.kill()
    watch.silence("w2")
    await asyncio.sleep(3 * watch.bus.times.dead_s)
    await broker.restart()
    await until(lambda: watch.placed(lost), 10)
    await watch.ticks()
    assert watch.placed(kept) == []
    assert not task.done()


async def test_a_frozen_brokers_silence_is_nobodys_death(
    watch: Watch, broker: EmbeddedBroker
) -> None:
    """Its connections stand, and nobody is heard: not even ourselves."""
    takeover, _ = await watch.start()
    watch.worker("w1")
    request_id, _ = await watch.claims("w1")
    await watch.until(lambda: len(takeover.ledger) == 1)
    freeze(broker.pid)
    try:
        await asyncio.sleep(5 * watch.bus.times.dead_s)
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    await watch.ticks(5)
    assert watch.placed(request_id) == []
    assert watch.lines.events("worker_dead") == []


async def test_who_claims_after_it_was_given_up_has_time_to_notice(
    watch: Watch, times: Times
) -> None:
    """It lives: it brings tokens, or drops the claim. To place the request again at once would
    give it to the same worker, epoch after epoch, until it looked like poison."""
    takeover, _ = await watch.start()
    await watch.say("w1")
    await watch.until(lambda: watch.lines.events("worker_dead"), 30)
    claimed_s = time.monotonic()
    request_id, seq = await watch.claims("w1")
    await watch.until(lambda: watch.placed(request_id), 30)
    assert time.monotonic() - claimed_s >= times.dead_s
    [(_, task)] = watch.placed(request_id)
    assert (task.epoch, task.after_seq) == (2, seq)
    await watch.append(Cancelled(request_id=request_id))
    await watch.until(lambda: not takeover._claimed_s)


async def test_a_claim_is_a_first_sign_of_life(watch: Watch, times: Times) -> None:
    """A worker that comes back under a new id may claim before its first beat is heard."""
    await watch.start()
    await watch.ticks(6)  # who was never heard by now counts as dead
    claimed_s = time.monotonic()
    request_id, _ = await watch.claims("new")
    watch.worker("alive")  # somebody is heard
    await watch.until(lambda: watch.placed(request_id), 30)
    assert time.monotonic() - claimed_s >= times.dead_s


async def test_what_was_missed_is_read(watch: Watch) -> None:
    """A claim and an end that were dropped on the way are found in the stream."""
    takeover, _ = await watch.start()
    ended, _ = await watch.claims("w0")
    await watch.until(lambda: len(takeover.ledger) == 1)
    hear = takeover._apply
    takeover._apply = lambda *message: None  # type: ignore[method-assign] # dropped
    missed, _ = await watch.claims("w1")
    await watch.append(Cancelled(request_id=ended))
    await watch.until(lambda: watch.ear.end(READER, ended))
    takeover._apply = hear  # type: ignore[method-assign]
    takeover._on_error(RuntimeError("slow consumer"))
    await watch.until(lambda: watch.placed(missed))
    assert watch.placed(ended) == []


# Queues of the dead ---------------------------------------------------------------------------


async def test_a_dead_workers_queue_moves_to_the_shared_one(watch: Watch, times: Times) -> None:
    """Delivered or not; its consumers are deleted, so that a frozen one learns of it."""
    await watch.start()
    watch.worker("w1", roles=("prefill", "decode"))
    own = worker_consumer("prefill", SERVED, "w1", times)
    fenced = asyncio.Event()
    taken: list[Any] = []
    pull = WorkPull(watch.bus, own, taken.append, lambda: 4 - len(taken), on_fenced=fenced.set)
    pulling = watch.tasks.create_task(pull.run())
    tasks = [prefill_task(new_id()) for _ in range(3)]
    for one in tasks:
        await send(watch.bus, subjects.prefill(SERVED, "w1"), one)
    ready = kv_ready(new_id())
    decode_task = DecodeTask(
        request_id=ready.request_id, epoch=2, after_seq=1, reader=READER, ready=ready
    )
    await send(watch.bus, subjects.decode(SERVED, "w1"), decode_task)
    await watch.until(lambda: len(taken) == 3)
    await watch.ticks(5)
    before = {subjects.prefill(SERVED, "w1"): 3, subjects.decode(SERVED, "w1"): 1}
    assert await waiting_work(watch.bus) == before
    watch.silence("w1")
    await pulling
    assert fenced.is_set()
    await watch.until(lambda: len(watch.ear.on(SHARED)) == 3)
    await watch.until(lambda: watch.ear.on(subjects.decode(SERVED)))
    moved = [decode(message.data, PrefillTask) for message in watch.ear.on(SHARED)]
    assert sorted(moved, key=lambda t: t.request_id) == sorted(tasks, key=lambda t: t.request_id)
    assert all(message.headers["Mesh-Attempt"] == "2" for message in watch.ear.on(SHARED))
    await watch.until(lambda: len(watch.lines.events("queue_moved")) == 2)
    consumers = (await watch.bus.api(f"CONSUMER.NAMES.{WORK}"))["consumers"]
    assert own.name not in consumers


async def test_work_placed_on_the_dead_is_found(watch: Watch) -> None:
    """A router with an old view placed there afterwards: the sweep finds it; so it does for an id
    that was never heard at all. An odd subject among them is no obstacle."""
    await watch.start()
    await watch.say("w1")
    await watch.say("w1", state="gone")
    await watch.until(lambda: watch.lines.events("worker_dead"))
    await watch.bus.publish_stored(f"{subjects.ROOT}.admission.a.b.c", b"")
    first, second = prefill_task(new_id()), prefill_task(new_id())
    await send(watch.bus, subjects.prefill(SERVED, "w1"), first)
    await send(watch.bus, subjects.prefill(SERVED, "never-heard"), second)
    await watch.until(lambda: len(watch.ear.on(SHARED)) == 2)


async def test_two_of_them_move_a_queue_once(watch: Watch, connect: Connect, times: Times) -> None:
    """Each message has one copy, whoever moved it."""
    await watch.start()
    await watch.start(await connect("control", name="second"))
    watch.worker("w1")
    await ensure_consumer(watch.bus, WORK, worker_consumer("prefill", SERVED, "w1", times))
    for _ in range(40):
        await send(watch.bus, subjects.prefill(SERVED, "w1"), prefill_task(new_id()))
    watch.silence("w1")
    async with asyncio.timeout(60):
        while await waiting_work(watch.bus) != {SHARED: 40}:
            pass
    await watch.ticks(10)
    assert await waiting_work(watch.bus) == {SHARED: 40}


# Ends -----------------------------------------------------------------------------------------


async def test_past_its_deadline_a_claimed_request_expires(watch: Watch) -> None:
    """Its worker lives and does not end it: take-over does, and tells the worker."""
    takeover, _ = await watch.start()
    watch.worker("w1")
    soon = watch.bus.now_unix_ms() + 100
    request_id, _ = await watch.claims("w1", deadline_unix_ms=soon)
    await watch.until(lambda: watch.ear.end(READER, request_id))
    assert watch.ear.end(READER, request_id) == Expired(request_id=request_id)
    assert watch.bus.now_unix_ms() >= soon
    await watch.until(lambda: watch.ear.on(subjects.cancel("w1")))
    assert len(takeover.ledger) == 0


async def test_a_cancel_is_passed_on_to_who_computes(watch: Watch) -> None:
    """A client writes one entry; the router sees who holds the request and tells it."""
    takeover, _ = await watch.start()
    watch.worker("w2")
    request_id, seq = await watch.claims("w1")
    await watch.append(claim(request_id, "w2", epoch=2), seq)
    ended, _ = await watch.claims("w2")
    await watch.append(stream_end(ended, 1, 4))
    await watch.append(Cancelled(request_id=request_id))
    await watch.until(lambda: watch.ear.on(subjects.cancel("w2")))
    await watch.ticks()
    words = [decode(m.data, CancelWord) for m in watch.ear.on(subjects.cancel("w2"))]
    assert words == [CancelWord(request_id=request_id)]  # none for what its worker ended itself
    assert watch.ear.on(subjects.cancel("w1")) == []
    takeover.ledger.check_invariants()


# What must not end it -------------------------------------------------------------------------


async def test_a_full_queue_is_waited_for(watch: Watch) -> None:
    """What can't be placed now is placed when there is room; the others are not held up."""
    await ensure_topology(watch.bus, Limits(queue_msgs=1))
    _, task = await watch.start()
    await watch.bus.publish_stored(SHARED, b"in the way")
    (first, _), (second, _) = await watch.claims("w1"), await watch.claims("w2")
    await watch.until(lambda: len(watch.lines.events("request_not_placed")) >= 2)
    refused = {line["request_id"] for line in watch.lines.events("request_not_placed")}
    assert refused == {first, second}
    await ensure_topology(watch.bus, Limits())
    placed_again = "request_placed_again"
    await watch.until(lambda: len(watch.lines.events(placed_again)) == 2)
    await watch.ticks()
    assert (await waiting_work(watch.bus))[SHARED] == 3
    assert not task.done()


async def test_a_queue_that_can_not_be_moved_is_tried_again(watch: Watch) -> None:
    """The shared one is full: nothing is lost, and it moves when there is room."""
    _, task = await watch.start()
    await watch.say("w1")
    await send(watch.bus, subjects.prefill(SERVED, "w1"), prefill_task(new_id()))
    await watch.bus.publish_stored(SHARED, b"in the way")
    await ensure_topology(watch.bus, Limits(queue_msgs=1))
    await watch.say("w1", state="gone")
    await watch.until(lambda: watch.lines.events("reap_failed"))
    await ensure_topology(watch.bus, Limits())
    await watch.until(lambda: watch.lines.events("queue_moved"), 10)
    assert await waiting_work(watch.bus) == {SHARED: 2}
    assert not task.done()


ODD_CLAIMS = {
    "a model that is no subject": {"served": "two tokens.*"},
    "a worker that is no subject": {"worker": "a b.>"},
    "another request than the chain's": {"request_id": "another-request"},
}


@pytest.mark.parametrize("case", ODD_CLAIMS)
async def test_what_clients_write_on_their_chains_harms_nobody(
    watch: Watch, connect: Connect, case: str
) -> None:
    """Clients may write there; take-over reads it, lives, and serves everybody else."""
    victim, _ = await watch.claims("w1", request_id="another-request")
    client, request_id = await connect("client"), new_id()
    fields = {
        "request_id": request_id,
        "epoch": 9,
        "worker": "w9",
        "role": "prefill",
        "served": SERVED,
        "deadline_unix_ms": watch.bus.now_unix_ms() + 300,
    }
    odd = Claim(**{**fields, **ODD_CLAIMS[case]})  # type: ignore[arg-type]
    await client.publish_stored(subjects.chain("client.x", request_id), encode(odd))
    await client.publish_stored(f"{subjects.ROOT}.token-stream.client.x=y.claim.{request_id}",
                                encode(odd))  # fmt: skip
    await client.publish_stored(subjects.chain("client.y", request_id), b"\xc1 rubbish")
    _, task = await watch.start()
    await watch.until(lambda: watch.placed(victim))
    await watch.until(lambda: watch.bus.now_unix_ms() > odd.deadline_unix_ms + 600)
    await watch.ticks()
    assert not task.done()
    assert [task.epoch for _, task in watch.placed(victim)] == [2]


async def test_ended_take_over_leaves_nothing_behind(watch: Watch) -> None:
    """Its subscriptions and callbacks go with it."""
    callbacks = len(watch.bus.on_reconnected), len(watch.bus.on_error)
    num_subscriptions = len(watch.bus._client._subs)
    _, task = await watch.start()
    await watch.say("w1", state="gone")
    await watch.until(lambda: watch.lines.events("worker_dead"))
    await watch.ticks()
    task.cancel()
    await asyncio.wait([task])
    assert (len(watch.bus.on_reconnected), len(watch.bus.on_error)) == callbacks
    assert len(watch.bus._client._subs) == num_subscriptions


# Leaving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", [False, True])
async def test_who_left_in_order_is_no_dead(watch: Watch, holds: bool) -> None:
    """A drain that finished everything is no warning; one that left something behind is."""
    heard: list[Claim] = []
    takeover, _ = await watch.start(on_claim=heard.append)
    for state in ("ready", "draining"):
        await watch.say("w1", state=state)
    if holds:
        request_id, _ = await watch.claims("w1")
        await watch.until(lambda: takeover.ledger.held_by("w1"))
        assert [one.request_id for one in heard] == [request_id]
    await watch.say("w1", state="gone")
    event, other = ("worker_dead", "worker_left") if holds else ("worker_left", "worker_dead")
    await watch.until(lambda: watch.lines.events(event))
    assert watch.lines.events(other) == []
    assert watch.lines.events(event)[0]["level"] == ("warning" if holds else "info")
