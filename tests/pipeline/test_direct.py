"""Work that is said without the queue: taken as if it came from there, else put there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from infra.bus import (
    Bus,
    DirectMessage,
    Limits,
    Msg,
    any_consumer,
    ensure_topology,
    peek,
    waiting_work,
)
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.dispatch import Dispatch
from pipeline.placement import PrefillPlace
from pipeline.records import INLINE_IDS_BYTES
from pipeline.records import prefill_task as task_of
from pipeline.stage import Handled, Stage, StageContext, Work, parse_as
from schemas import subjects
from schemas.codec import decode, tag_of
from schemas.errors import BusUnavailable, InvalidRequest, NoCapacity
from schemas.headers import MSG_ID, WorkHeaders
from schemas.prefill import PrefillTask
from schemas.tokens import Cancelled
from tests.conftest import Until
from tests.pipeline.rig import (
    READER,
    SERVED,
    Ear,
    LogLines,
    new_id,
    prefill_task,
    record,
    running,
    send_direct,
    stage_context,
)

OWN = subjects.prefill(SERVED, "w1")
SHARED = subjects.prefill(SERVED)


class Gate:
    """A handler that lets in as many as it has room for, and lets go when it is told."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.works: list[Work[PrefillTask]] = []
        self.error: Exception | None = None
        self.opened = asyncio.Event()
        self.opened.set()

    async def __call__(self, work: Work[PrefillTask]) -> Handled:
        self.works.append(work)
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        answer = Cancelled(request_id=work.message.request_id)
        return Handled(outcome="done", answer=answer)


def stage_of(ctx: StageContext, gate: Gate) -> Stage[PrefillTask]:
    stage: Stage[PrefillTask] = Stage(
        ctx,
        "prefill",
        any_consumer("prefill", SERVED, ctx.bus.times),
        parse_as(PrefillTask),
        lambda task: task.reader,
        gate,
        capacity=lambda: gate.room - stage.num_running,
        direct=subjects.direct(OWN),
    )
    return stage


@asynccontextmanager
async def at_work(ctx: StageContext, gate: Gate, until: Until) -> AsyncIterator[Stage[PrefillTask]]:
    """The stage, once it hears what is said directly."""
    stage = stage_of(ctx, gate)
    async with running(stage):
        while not gate.works:  # what nobody hears is gone
            await send_direct(ctx.bus, OWN, prefill_task(new_id()))
            await waiting_work(ctx.bus)  # a round trip
        await until(lambda: stage.num_running == 0)
        gate.works.clear()
        yield stage


# A stage --------------------------------------------------------------------------------------


async def test_what_is_said_is_handled_and_answered(
    ctx: StageContext, ear: Ear, until: Until
) -> None:
    """As a delivered message is, but for the ack: the queue never sees it."""
    gate, request_id = Gate(), new_id()
    async with at_work(ctx, gate, until):
        await send_direct(ctx.bus, OWN, prefill_task(request_id), reply="mesh.v1.trace.answer")
        await until(lambda: ear.on("mesh.v1.trace.answer"))
    (work,) = gate.works
    assert (work.message.request_id, work.subject, work.is_direct) == (request_id, OWN, True)
    (answer,) = ear.on("mesh.v1.trace.answer")
    assert decode(answer.data, Cancelled).request_id == request_id
    assert await waiting_work(ctx.bus) == {}


async def test_what_finds_no_room_waits_in_line(ctx: StageContext, until: Until) -> None:
    """It is taken as soon as there is room, in the order in which it came."""
    gate, ids = Gate(room=1), [new_id() for _ in range(3)]
    async with at_work(ctx, gate, until):
        gate.opened.clear()
        for request_id in ids:
            await send_direct(ctx.bus, OWN, prefill_task(request_id))
        await until(lambda: gate.works)
        assert [work.message.request_id for work in gate.works] == ids[:1]
        gate.opened.set()
        await until(lambda: len(gate.works) == 3)
    assert [work.message.request_id for work in gate.works] == ids
    assert await waiting_work(ctx.bus) == {}


async def test_too_long_a_line_goes_into_the_queue(
    ctx: StageContext, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is bounded; nothing is dropped."""
    monkeypatch.setattr("pipeline.stage._MAX_IN_LINE", 2)
    gate = Gate(room=1)
    async with at_work(ctx, gate, until):
        gate.opened.clear()
        for _ in range(5):
            await send_direct(ctx.bus, OWN, prefill_task(new_id()))
        async with asyncio.timeout(60):
            while await waiting_work(ctx.bus) != {OWN: 2}:
                pass
        gate.opened.set()
        await until(lambda: len(gate.works) == 3)


async def test_what_may_succeed_later_goes_into_the_queue(
    ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """With its headers, and under its message id: whoever queues it as well, queues it once."""
    gate, task, msg_id = Gate(), prefill_task(new_id()), new_id()
    async with at_work(ctx, gate, until):
        gate.error = NoCapacity("not now")
        await send_direct(ctx.bus, OWN, task, msg_id=msg_id)
        await until(lambda: "later" in lines.outcomes("prefill"))
    (stored,) = [message async for message in peek(ctx.bus, OWN)]
    headers = WorkHeaders.from_dict(stored.headers)
    assert decode(stored.data, PrefillTask) == task
    assert (headers.request_id, headers.schema) == (task.request_id, tag_of(PrefillTask))
    assert stored.headers[MSG_ID] == msg_id


async def test_what_is_refused_is_told(ctx: StageContext, ear: Ear, until: Until) -> None:
    """On the chain, as ever; the queue has nothing to do with it."""
    gate, request_id = Gate(), new_id()
    async with at_work(ctx, gate, until):
        gate.error = InvalidRequest("never", param="prompt")
        await send_direct(ctx.bus, OWN, prefill_task(request_id))
        await until(lambda: ear.end(READER, request_id))
    assert await waiting_work(ctx.bus) == {}


async def test_garbage_is_buried(ctx: StageContext, ear: Ear, until: Until) -> None:
    """The stage lives on."""
    gate = Gate()
    async with at_work(ctx, gate, until):
        await ctx.bus.publish(subjects.direct(OWN), b"\xc1", {})
        await until(ear.letters)
        await send_direct(ctx.bus, OWN, prefill_task(new_id()))
        await until(lambda: gate.works)
    assert ear.letters()[0].subject == OWN


async def test_a_stage_that_ends_leaves_its_line_to_the_queue(
    ctx: StageContext, until: Until
) -> None:
    """Told to stop, or cancelled: what it has not begun is for others."""
    gate = Gate(room=1)
    async with at_work(ctx, gate, until) as stage:
        gate.opened.clear()
        for _ in range(3):
            await send_direct(ctx.bus, OWN, prefill_task(new_id()))
        await until(lambda: gate.works)
        await waiting_work(ctx.bus)  # a round trip: the others have come as well
        stage.stop()
        await until_queued(ctx.bus, {OWN: 2})
    assert await waiting_work(ctx.bus) == {OWN: 3}


async def test_a_full_queue_leaves_it_to_who_said_it(
    ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """It can't be put back; nothing crashes over it."""
    gate = Gate()
    async with at_work(ctx, gate, until):
        await ensure_topology(ctx.bus, Limits(queue_msgs=1))
        gate.error = NoCapacity("not now")
        for _ in range(2):
            await send_direct(ctx.bus, OWN, prefill_task(new_id()))
        await until(lambda: len(lines.outcomes("prefill")) >= 3)
    assert sorted(lines.outcomes("prefill")[-2:]) == ["bus_away", "later"]


async def test_odd_headers_end_nobody(ctx: StageContext) -> None:
    """They can be sent, and read, but not written again: the message is left to who said it."""
    odd = Msg(subjects.direct(OWN), "", b"", b"NATS/1.0\r\nan odd name: 1\r\n\r\n")
    with pytest.raises(BusUnavailable):
        await DirectMessage(ctx.bus, odd).nak()
    assert await waiting_work(ctx.bus) == {}


# Dispatch -------------------------------------------------------------------------------------


def headers_of(request_id: str) -> WorkHeaders:
    return WorkHeaders(schema="", request_id=request_id, epoch=0, deadline_unix_ms=2**50)


@asynccontextmanager
async def dispatching(ctx: StageContext) -> AsyncIterator[Dispatch]:
    dispatch = Dispatch(ctx.bus, ctx.chain, ctx.log)
    async with task_scope() as tasks:
        tasks.create_task(dispatch.run())
        yield dispatch


def say(dispatch: Dispatch, request_id: str, worker: str = "w1", **fields: Any) -> bool:
    told = replace(record(request_id), **fields)
    return dispatch.say(told, PrefillPlace(worker=worker), headers_of(request_id))


async def until_queued(bus: Bus, expected: dict[str, int]) -> None:
    async with asyncio.timeout(60):
        while await waiting_work(bus) != expected:
            pass


async def test_a_claimed_task_is_never_queued(
    ctx: StageContext, ear: Ear, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was heard by its worker, whole, with its headers; the claim ends the watch."""
    await ctx.bus.subscribe(subjects.direct(OWN), lambda _: None)
    request_id = new_id()
    async with dispatching(ctx) as dispatch:
        assert say(dispatch, request_id)
        assert len(dispatch) == 1
        dispatch.heard(request_id)
        assert len(dispatch) == 0
        await dispatch.finish()
        await until(lambda: ear.on(subjects.direct(OWN)))
    (message,) = ear.on(subjects.direct(OWN))
    task = task_of(record(request_id), PrefillPlace(worker="w1"), is_recorded=False)
    assert decode(message.data, PrefillTask) == task.message
    assert WorkHeaders.from_dict(message.headers).epoch == 1
    assert await waiting_work(ctx.bus) == {}


async def test_a_task_that_nobody_hears_is_queued_at_once(ctx: StageContext) -> None:
    """The worker has just died: the broker says so, and no time is lost."""
    request_id = new_id()
    async with dispatching(ctx) as dispatch:
        assert say(dispatch, request_id)
        await until_queued(ctx.bus, {SHARED: 1})
        assert len(dispatch) == 0
    (queued,) = [message async for message in peek(ctx.bus, SHARED)]
    assert decode(queued.data, PrefillTask).is_recorded
    found = await ctx.chain.record(request_id)
    assert found is not None
    assert found[1] == record(request_id)


async def test_a_task_that_nobody_claims_is_queued(
    ctx: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is frozen, or died with it."""
    monkeypatch.setattr("pipeline.dispatch.CLAIM_S", 0.0)
    await ctx.bus.subscribe(subjects.direct(OWN), lambda _: None)
    async with dispatching(ctx) as dispatch:
        assert say(dispatch, new_id())
        await until_queued(ctx.bus, {SHARED: 1})


async def test_what_was_said_to_one_that_is_gone_is_queued_at_once(ctx: StageContext) -> None:
    """For whoever pulls it; what others were told is left to them."""
    every_worker = subjects.direct(SHARED).removesuffix(subjects.ANY) + "*"
    await ctx.bus.subscribe(every_worker, lambda _: None)
    lost, kept = new_id(), new_id()
    async with dispatching(ctx) as dispatch:
        assert say(dispatch, lost)
        assert say(dispatch, kept, "w2")
        dispatch.lost("w1")
        await until_queued(ctx.bus, {SHARED: 1})
        assert len(dispatch) == 1
        dispatch.heard(kept)


async def test_a_process_that_leaves_queues_the_rest(ctx: StageContext) -> None:
    """Nobody else watches over what it said."""
    await ctx.bus.subscribe(subjects.direct(OWN), lambda _: None)
    dispatch = Dispatch(ctx.bus, ctx.chain, ctx.log)
    for _ in range(2):
        assert say(dispatch, new_id())
    await dispatch.finish()
    assert await waiting_work(ctx.bus) == {SHARED: 2}


async def test_what_can_not_be_said_is_for_the_queue(
    ctx: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is named, too much is said already, or the task is larger than a message."""
    dispatch = Dispatch(ctx.bus, ctx.chain, ctx.log)
    assert not say(dispatch, new_id(), subjects.ANY)
    assert not say(dispatch, new_id(), prompt_ids=bytes(INLINE_IDS_BYTES + 4))
    assert not say(dispatch, new_id(), reader_note=bytes(ctx.bus.max_payload))
    monkeypatch.setattr("pipeline.dispatch.MAX_SAID", 0)
    assert not say(dispatch, new_id())
    assert len(dispatch) == 0


async def test_a_task_of_a_broken_bus_is_left_to_who_asked(
    ctx: StageContext, connect: Any, lines: LogLines, broker: Any, until: Until
) -> None:
    """It was promised to nobody: whoever waits for it asks again."""
    bus = await connect("control")
    dispatch = Dispatch(bus, ClaimChain(bus), stage_context(bus, lines).log)
    await ctx.bus.subscribe(subjects.direct(OWN), lambda _: None)
    assert say(dispatch, new_id())
    await broker.kill()
    await until(lambda: not bus.is_connected)
    await dispatch.finish()
    assert not say(dispatch, new_id())
    assert len(lines.events("task_not_queued")) == 1
    await broker.restart()
    await until(lambda: bus.is_connected and ctx.bus.is_connected, 10)


def test_a_direct_subject_is_the_queues_own() -> None:
    """There and back, and a queue's own subject is kept."""
    assert subjects.direct(OWN) == "mesh.v1.direct.prefill.tiny@r1.w1"
    assert subjects.queued(subjects.direct(OWN)) == subjects.queued(OWN) == OWN
