"""The feed on a real broker: workers that say what they hold, control processes that listen."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest_asyncio

from infra.bus import Bus
from infra.log import make_logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.fleet import Fleet
from pipeline.index_feed import IndexFeed
from pipeline.radix_index import RadixIndex
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat
from tests.conftest import Connect, Until
from tests.pipeline.kv_rig import name_of, names
from tests.pipeline.rig import SERVED, LogLines, beat
from workers.kv.event_publisher import EventPublisher
from workers.kv.events import BlockLog


class LossyBus:
    """A connection on which every so many batches is lost on its way."""

    def __init__(self, bus: Bus, rng: random.Random, share: float) -> None:
        self._bus, self._rng, self._share = bus, rng, share
        self.num_lost = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, data: bytes = b"", **more: Any) -> None:
        if ".kv-events." in subject and self._rng.random() < self._share:
            self.num_lost += 1
        else:
            await self._bus.publish(subject, data, **more)


@dataclass(slots=True)
class Control:
    """One control process: its fleet and its index."""

    fleet: Fleet
    index: RadixIndex
    feed: IndexFeed
    metrics: Metrics
    lines: LogLines

    def hear(self, one: Beat) -> None:
        self.fleet.hear(one, time.monotonic())
        self.feed.hear_beat(one)

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


@dataclass(slots=True)
class Peer:
    """One worker id."""

    worker: str
    bus: Any
    blocks: BlockLog
    publisher: EventPublisher
    task: asyncio.Task[None]

    def beat(self, state: str = "ready") -> Beat:
        told = beat(self.worker, state=state)
        return Beat(
            process=told.process,
            kind="worker",
            state=told.state,
            host="here",
            pid=1,
            started_unix_ms=1,
            worker=self.worker,
            roles=("prefill",),
            served=SERVED,
            fingerprint="f00d",
            block_size=4,
            kv_seq=self.publisher.seq,
        )


@dataclass(slots=True)
class Place:
    """Workers and control processes on one broker."""

    connect: Connect
    until: Until
    tasks: asyncio.TaskGroup
    controls: list[Control] = field(default_factory=list)
    peers: dict[str, Peer] = field(default_factory=dict)

    async def control(self) -> Control:
        bus = await self.connect("control")
        fleet, index, metrics, lines = (
            Fleet(1e9, time.monotonic()), RadixIndex(100_000), Metrics(), LogLines(),
        )  # fmt: skip
        log = make_logger("test", stream=lines.stream)
        feed = IndexFeed(bus, index, fleet, metrics, log)
        self.tasks.create_task(feed.run())
        control = Control(fleet, index, feed, metrics, lines)
        await bus.subscribe(subjects.ALL_BEATS, lambda said: control.hear(decode(said.data, Beat)))
        self.controls.append(control)
        return control

    async def peer(self, worker: str, blocks: BlockLog | None = None, bus: Any = None) -> Peer:
        bus = bus or await self.connect("worker")
        blocks = blocks or BlockLog()
        log = make_logger("test", stream=LogLines().stream)
        publisher = EventPublisher(bus, blocks, SERVED, worker, log)
        task = self.tasks.create_task(publisher.run())
        await self.until(lambda: blocks.on_change is not None)
        self.peers[worker] = Peer(worker, bus, blocks, publisher, task)
        return self.peers[worker]

    async def beat_for_ever(self, beat_s: float) -> None:
        """Over each worker's own connection: a beat comes behind the batches that it knows of."""
        while True:
            for peer in list(self.peers.values()):
                one = peer.beat()
                await peer.bus.publish(subjects.beat(one.process), encode(one))
            await asyncio.sleep(beat_s)

    async def leaves(self, worker: str) -> BlockLog:
        """A worker id ends; its process, and what that holds, need not."""
        peer = self.peers.pop(worker)
        peer.task.cancel()
        await self.until(peer.task.done)
        for control in self.controls:
            control.hear(peer.beat("gone"))
        return peer.blocks

    def is_true(self, control: Control) -> bool:
        """Whether an index says of each worker what that holds, and of nobody else anything."""
        return control.index.workers == sorted(
            worker for worker, peer in self.peers.items() if peer.blocks.held()
        ) and all(
            control.index.held_by(worker) == peer.blocks.held()
            for worker, peer in self.peers.items()
        )


@pytest_asyncio.fixture
async def place(bus: Bus, connect: Connect, until: Until) -> AsyncIterator[Place]:
    async with task_scope() as tasks:
        made = Place(connect, until, tasks)
        tasks.create_task(made.beat_for_ever(bus.times.beat_s))
        yield made


async def test_what_a_worker_stores_is_known_without_a_question(place: Place) -> None:
    """Events in order are enough; no snapshot is taken, no gap is counted."""
    control, peer = await place.control(), await place.peer("w1")
    await place.until(lambda: control.fleet.worker("w1") is not None)
    for name in names(20):
        peer.blocks.stored("device", name)
    await place.until(lambda: place.is_true(control))
    peer.blocks.removed("device", name_of(0, 19).block_hash)
    peer.blocks.stored("host", name_of(0, 3))
    await place.until(lambda: place.is_true(control))
    hashes = [name.block_hash for name in names(25)]
    (match,) = control.index.lookup(hashes)
    assert (match.worker, match.num_blocks, match.tier) == ("w1", 19, "device")
    assert control.value("mesh_kv_index_snapshots_total") == 0
    await place.until(lambda: control.value("mesh_kv_index_blocks") == 19)
    assert control.value("mesh_kv_index_changes_total") == 22


async def test_thousands_of_events_on_a_bus_that_loses_some(place: Place, connect: Connect) -> None:
    """Lost batches are noticed by the next one or by a heartbeat, and a snapshot sets it right."""
    rng = random.Random(7)
    control = await place.control()
    lossy = [LossyBus(await connect("worker"), rng, 0.3) for _ in range(3)]
    peers = [await place.peer(f"w{n}", bus=bus) for n, bus in enumerate(lossy)]
    for number in range(4000):
        blocks = rng.choice(peers).blocks
        name = name_of(rng.randrange(30), rng.randrange(20))
        if rng.random() < 0.6:
            blocks.stored(rng.choice(("device", "host", "disk")), name)
        else:
            blocks.removed("device", name.block_hash)
        if number % 200 == 0:
            seq = peers[0].publisher.seq
            peers[0].blocks.stored("host", name_of(99, number // 200))
            await place.until(lambda seq=seq: peers[0].publisher.seq > seq)
    await place.until(lambda: place.is_true(control))
    control.index.check_invariants()
    assert sum(bus.num_lost for bus in lossy) > 0
    await place.until(lambda: control.value("mesh_kv_index_gaps_total") > 0)


async def test_a_control_process_that_starts_late_has_all_of_it_and_agrees(place: Place) -> None:
    """From heartbeats and snapshots alone; large ones come in several parts."""
    first = await place.control()
    for worker, tier in (("w1", "host"), ("w2", "disk")):
        peer = await place.peer(worker)
        for number in range(200):
            for name in names(100, number):
                peer.blocks.stored(tier, name)  # type: ignore[arg-type]
    await place.until(lambda: place.is_true(first))
    late = await place.control()
    await place.until(lambda: place.is_true(late))
    hashes = [name.block_hash for name in names(100, 7)]
    assert late.index.lookup(hashes) == first.index.lookup(hashes)
    assert len(late.index.lookup(hashes)) == 2
    assert late.index.num_blocks == 20_000


async def test_a_worker_that_does_not_answer_delays_nobody(place: Place) -> None:
    """A frozen one is asked in vain until it is declared dead; others' snapshots come meanwhile."""
    frozen = await place.connect("worker")
    asked: list[object] = []
    await frozen.subscribe(subjects.kv_snapshot("frozen"), asked.append)
    control = await place.control()
    control.hear(_frozen_beat("ready"))
    await place.until(lambda: asked)
    peer = await place.peer("w1")
    for name in names(10):
        peer.blocks.stored("host", name)
    await place.until(lambda: peer.publisher.seq > 0)
    late = await place.control()
    late.hear(_frozen_beat("ready"))
    await place.until(lambda: late.index.held_by("w1") == peer.blocks.held())
    await place.until(lambda: control.lines.events("kv_snapshot_missed"))
    assert late.feed._book.stale() == ["frozen"]
    for one in (control, late):
        one.hear(_frozen_beat("gone"))
        await place.until(lambda one=one: one.feed._book.workers == ["w1"])


def _frozen_beat(state: str) -> Beat:
    return Beat(
        process="worker-frozen",
        kind="worker",
        state=state,  # type: ignore[arg-type]
        host="here",
        pid=1,
        started_unix_ms=1,
        worker="frozen",
        kv_seq=3,
    )


async def test_a_worker_that_is_gone_holds_nothing(place: Place) -> None:
    """With the verdict of the fleet; what comes from its id after that is not heard."""
    control, peer = await place.control(), await place.peer("w1")
    for name in names(10):
        peer.blocks.stored("host", name)
    await place.until(lambda: place.is_true(control))
    blocks = await place.leaves("w1")
    await place.until(lambda: control.index.workers == [])
    await place.until(lambda: control.value("mesh_kv_index_blocks") == 0)
    zombie = await place.peer("w1", blocks)
    zombie.blocks.stored("host", name_of(5, 0))
    await place.until(lambda: zombie.publisher.seq > 1)
    await place.peer("w2")
    place.peers["w2"].blocks.stored("host", name_of(6, 0))
    await place.until(lambda: control.index.held_by("w2"))  # after what the zombie said
    assert control.index.workers == ["w2"]


async def test_a_new_id_announces_what_its_process_still_holds(place: Place) -> None:
    """The old id's blocks go, the new one's come by snapshot: nothing is computed for that."""
    control, peer = await place.control(), await place.peer("w1")
    for name in names(10):
        peer.blocks.stored("host", name)
    await place.until(lambda: place.is_true(control))
    blocks = await place.leaves("w1")
    await place.peer("w1-again", blocks)
    await place.until(lambda: place.is_true(control))
    assert control.index.workers == ["w1-again"]
    assert control.index.held_by("w1-again") == blocks.held() != {}


async def test_a_burst_that_is_too_much_for_a_batch_is_a_gap(place: Place) -> None:
    """The worker says so, and the reader takes a snapshot."""
    control = await place.control()
    peer = await place.peer("w1", BlockLog(max_changes=8))
    for name in names(50):
        peer.blocks.stored("device", name)
    await place.until(lambda: place.is_true(control))
    await place.until(lambda: control.value("mesh_kv_index_snapshots_total") > 0)


async def test_bytes_that_are_no_events_stop_nothing(place: Place, connect: Connect) -> None:
    """They are refused with a line, and what comes next counts."""
    control, peer = await place.control(), await place.peer("w1")
    stranger = await connect("worker")
    await stranger.publish(subjects.kv_events(SERVED, "w1"), b"nonsense")
    await stranger.publish(subjects.kv_snapshot("w1"), b"nonsense", reply="_INBOX_worker.x")
    await place.until(lambda: control.lines.events("kv_events_refused"))
    peer.blocks.stored("host", name_of(0, 0))
    await place.until(lambda: place.is_true(control))
