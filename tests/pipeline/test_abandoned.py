"""Requests of bridges that died: who ends them, when, and who keeps them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from infra.bus import Bus
from infra.log import make_logger
from infra.metrics import Metrics
from infra.task_scope import task_scope
from infra.times import Times
from pipeline.claim_chain import ClaimChain
from pipeline.fleet import Fleet
from pipeline.takeover import TakeOver
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Adopt, Beat, CancelWord
from schemas.tokens import Cancelled
from tests.conftest import Until
from tests.pipeline.rig import READER, LogLines, claim, new_id
from tests.pipeline.rig import beat as worker_beat

A, B = "bridge-a-0a1b2c3d", "bridge-b-0a1b2c3d"
WINDOW_S = 1.2
WORKER = "decode-0-1f2e"


@pytest.fixture(scope="session")
def times() -> Times:
    """A tenth of the real ones, and a window that is not waited for long."""
    return dataclasses.replace(Times().scaled(0.1), resume_window_s=WINDOW_S)


@dataclass
class Scene:
    """One live worker, and bridges that are nothing but what they say."""

    bus: Bus
    chain: ClaimChain
    tasks: asyncio.TaskGroup
    until: Until
    lines: LogLines = field(default_factory=LogLines)
    words: list[str] = field(default_factory=list)

    async def start(self) -> TakeOver:
        bus = self.bus
        fleet = Fleet(bus.times.dead_s, time.monotonic())
        log = make_logger("test", stream=self.lines.stream)
        takeover = TakeOver(bus, self.chain, fleet, Metrics(), log)
        self.tasks.create_task(takeover.run())
        await self.until(lambda: not takeover._must_read)
        return takeover

    async def claimed(self, reader: str) -> str:
        request_id = new_id()
        assert await self.chain.append(reader, claim(request_id, WORKER), 0)
        return request_id

    @asynccontextmanager
    async def saying(self, subject: str, message: Beat | Adopt) -> AsyncIterator[None]:
        """Said with every beat."""

        async def say() -> None:
            while True:
                await self.bus.publish(subject, encode(message))
                await asyncio.sleep(self.bus.times.beat_s)

        async with task_scope() as tasks:
            tasks.create_task(say())
            yield

    async def end(self, reader: str, request_id: str, timeout_s: float = 60.0) -> Cancelled:
        async with asyncio.timeout(timeout_s):
            while not (tip := await self.chain.tip(reader, request_id)).has_ended:
                await asyncio.sleep(0.01)
        assert isinstance(tip.entry, Cancelled)
        return tip.entry

    async def has_ended(self, reader: str, request_id: str) -> bool:
        return (await self.chain.tip(reader, request_id)).has_ended


@pytest_asyncio.fixture
async def scene(bus: Bus, until: Until) -> AsyncIterator[Scene]:
    async with task_scope() as tasks:
        scene = Scene(bus, ClaimChain(bus), tasks, until)
        await bus.subscribe(
            subjects.cancel(WORKER),
            lambda message: scene.words.append(decode(message.data, CancelWord).request_id),
        )
        worker = worker_beat(WORKER, roles=("decode",))
        async with scene.saying(subjects.beat(worker.process), worker):
            yield scene


def beat(process: str) -> Beat:
    return Beat(
        process=process, kind="bridge", state="ready", host="here", pid=1, started_unix_ms=1
    )


async def test_a_dead_bridges_requests_end_after_the_window(scene: Scene) -> None:
    """Cancelled on the chain, and the worker hears the quick word; those of a live bridge and of
    direct clients run on."""
    await scene.start()
    dead, live = subjects.bridge_reader(A), subjects.bridge_reader(B)
    ids = {reader: await scene.claimed(reader) for reader in (dead, live, READER)}
    async with scene.saying(subjects.beat(B), beat(B)):
        async with scene.saying(subjects.beat(A), beat(A)):
            await asyncio.sleep(WINDOW_S + 0.3)
            assert not await scene.has_ended(dead, ids[dead])
        silent_s = time.monotonic()
        entry = await scene.end(dead, ids[dead])
        assert time.monotonic() - silent_s > WINDOW_S - 2 * scene.bus.times.beat_s
        assert entry.reason == "its bridge is gone and nobody resumed it"
        await scene.until(lambda: scene.words == [ids[dead]])
        assert not await scene.has_ended(live, ids[live])
        assert not await scene.has_ended(READER, ids[READER])
    assert [line["request_id"] for line in scene.lines.events("request_abandoned")] == [ids[dead]]


async def test_an_adopted_request_runs_on_while_its_adopter_does(scene: Scene) -> None:
    """A restarted control process learns of the adoption from the next beat; when the adopter
    falls silent as well, the request ends a window later."""
    reader = subjects.bridge_reader(A)
    adopted, alone = await scene.claimed(reader), await scene.claimed(reader)
    async with scene.saying(subjects.adopt(B), Adopt(process=B, request_ids=(adopted,))):
        await scene.start()
        started_s = time.monotonic()
        await scene.end(reader, alone)
        assert time.monotonic() - started_s > WINDOW_S - 0.1, "it may have been heard just before"
        await asyncio.sleep(0.3)
        assert not await scene.has_ended(reader, adopted)
    silent_s = time.monotonic()
    await scene.end(reader, adopted)
    assert time.monotonic() - silent_s > WINDOW_S - 2 * scene.bus.times.beat_s


async def test_many_are_ended_tick_by_tick(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, each ends, once; garbage among the adoptions changes nothing."""
    monkeypatch.setattr("pipeline.takeover._ENDED_PER_TICK", 4)
    reader = subjects.bridge_reader(A)
    ids = [await scene.claimed(reader) for _ in range(10)]
    await scene.start()
    await scene.bus.publish(subjects.adopt(B), b"garbage")
    for request_id in ids:
        await scene.end(reader, request_id)
    await scene.until(lambda: sorted(scene.words) == sorted(ids))
