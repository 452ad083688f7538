"""Requests that wait in the queue, and whom nobody waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from infra.bus import Bus, waiting_work
from infra.log import make_logger
from pipeline.attendance import ABANDONED, Attendance
from pipeline.claim_chain import ClaimChain
from pipeline.unclaimed import Unclaimed
from schemas import subjects
from schemas.control import Adopt, Beat
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Cancelled, Expired
from tests.pipeline.rig import READER, SERVED, LogLines, new_id, record, send

WINDOW_S = 30.0
DEAD, LIVE = "bridge-dead-0a1b", "bridge-live-0a1b"
FAR_MS = 2**50


@dataclass
class Scene:
    """A queue, and a roll that has been kept for longer than the window."""

    bus: Bus
    lines: LogLines = field(default_factory=LogLines)

    def __post_init__(self) -> None:
        self.chain = ClaimChain(self.bus)
        self.roll = Attendance(WINDOW_S, time.monotonic() - 2 * WINDOW_S)
        log = make_logger("test", stream=self.lines.stream)
        self.here: list[RequestRecord] = []
        self.unclaimed = Unclaimed(
            self.bus, self.chain, self.roll, log, waiting=lambda: iter(self.here)
        )

    async def queue(self, reader: str, deadline_unix_ms: int = FAR_MS) -> str:
        request_id = new_id()
        task = PrefillTask(request_id=request_id, epoch=1, after_seq=0, reader=reader)
        await send(self.bus, subjects.prefill(SERVED), task, deadline_unix_ms=deadline_unix_ms)
        return request_id

    async def num_waiting(self) -> int:
        return sum((await waiting_work(self.bus)).values())


@pytest.fixture
def scene(bus: Bus) -> Scene:
    return Scene(bus)


def hear(roll: Attendance, process: str, age_s: float) -> None:
    beat = Beat(
        process=process, kind="bridge", state="ready", host="here", pid=1, started_unix_ms=1
    )
    roll.hear_beat(beat, time.monotonic() - age_s)


async def test_a_dead_bridges_waiting_requests_are_cancelled(scene: Scene) -> None:
    """And leave the queue; those of a live bridge, of a direct client, and one that another
    bridge has adopted stay."""
    hear(scene.roll, DEAD, age_s=WINDOW_S + 1)
    hear(scene.roll, LIVE, age_s=0.0)
    dead, live = subjects.bridge_reader(DEAD), subjects.bridge_reader(LIVE)
    lost = [await scene.queue(dead), await scene.queue(dead)]
    kept = [(reader, await scene.queue(reader)) for reader in (dead, live, READER)]
    adopted = Adopt(process=LIVE, request_ids=(kept[0][1],))
    scene.roll.hear_adopt(adopted, time.monotonic())
    assert await scene.unclaimed.look() == 2
    for request_id in lost:
        tip = await scene.chain.tip(dead, request_id)
        assert tip.entry == Cancelled(request_id=request_id, reason=ABANDONED)
    for reader, request_id in kept:
        assert (await scene.chain.tip(reader, request_id)).seq == 0
    assert await scene.num_waiting() == 3
    logged = scene.lines.events("waiting_request_ended")
    assert [line["request_id"] for line in logged] == lost


async def test_those_that_wait_in_this_process_are_looked_at_too(scene: Scene) -> None:
    """They have no task in a queue yet; what ends their waiting is the entry on their chain."""
    hear(scene.roll, DEAD, age_s=WINDOW_S + 1)
    hear(scene.roll, LIVE, age_s=0.0)
    dead, live = subjects.bridge_reader(DEAD), subjects.bridge_reader(LIVE)
    lost, kept = record(new_id(), reader=dead), record(new_id(), reader=live)
    scene.here += [lost, kept]
    assert await scene.unclaimed.look() == 1
    ended = Cancelled(request_id=lost.request_id, reason=ABANDONED)
    assert (await scene.chain.tip(dead, lost.request_id)).entry == ended
    assert (await scene.chain.tip(live, kept.request_id)).seq == 0


async def test_what_is_past_its_deadline_makes_room(scene: Scene) -> None:
    """Whoever asked for it: no worker would compute it."""
    late = await scene.queue(READER, deadline_unix_ms=1)
    await scene.queue(READER)
    assert await scene.unclaimed.look() == 1
    assert (await scene.chain.tip(READER, late)).entry == Expired(request_id=late)
    assert await scene.num_waiting() == 1


async def test_one_that_has_ended_otherwise_keeps_its_end(scene: Scene) -> None:
    """Only its task goes."""
    late = await scene.queue(READER, deadline_unix_ms=1)
    first = Cancelled(request_id=late, reason="its client left")
    await scene.chain.end(READER, first)
    assert await scene.unclaimed.look() == 1
    assert (await scene.chain.tip(READER, late)).entry == first
    assert await scene.num_waiting() == 0


async def test_what_can_not_be_read_is_left_to_whoever_takes_it(scene: Scene) -> None:
    """Garbage is no reason to stop, and a dead letter is for the stage to write."""
    await scene.bus.publish_stored(subjects.prefill(SERVED), b"garbage")
    await scene.queue(READER, deadline_unix_ms=1)
    assert await scene.unclaimed.look() == 1
    assert await scene.num_waiting() == 1


async def test_two_control_processes_end_each_once(scene: Scene) -> None:
    """The chain takes one end, and the queue loses one task."""
    late = await scene.queue(READER, deadline_unix_ms=1)
    other = Scene(scene.bus)
    await scene.unclaimed.look()
    assert await other.unclaimed.look() == 0
    assert (await scene.chain.tip(READER, late)).entry == Expired(request_id=late)
