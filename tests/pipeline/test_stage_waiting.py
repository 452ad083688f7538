"""Messages that wait for something between what they publish and their ack."""

from __future__ import annotations

import asyncio

from infra.bus import waiting_work
from pipeline.stage import Handled, Stage, StageContext, Work
from schemas.errors import InvalidRequest
from schemas.prefill import PrefillTask
from schemas.tokens import Expired, StreamError
from tests.conftest import Until
from tests.pipeline.rig import READER, Ear, LogLines, new_id, prefill_task, running, send
from tests.pipeline.test_stage import (
    DONE,
    NEXT,
    SUBJECT,
    Handler,
    make_stage,
    then_kv_ready,
    until_gone,
)


class Door:
    """A handler whose messages all wait until the door is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.num_cancelled = 0
        self.handler = Handler(self.answer)

    async def answer(self, work: Work[PrefillTask], _: int) -> Handled:
        async def then() -> Handled:
            try:
                await self.opened.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            return Handled(outcome="let in")

        return Handled(outcome="waits", publish=then_kv_ready(work).publish, then=then)


async def test_what_waits_has_published_and_is_not_acked(
    ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """It lies in its queue until what it waited for is there, however long that takes."""
    door = Door()
    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    stage = make_stage(ctx, door.handler)
    async with running(stage):
        await until(lambda: stage.num_waiting == 1)
        loop = asyncio.get_running_loop()
        long_s = loop.time() + 1.5 * ctx.bus.times.ack_wait_s  # no un-acked one is left so long
        await until(lambda: loop.time() > long_s)
        lies = await waiting_work(ctx.bus)
        assert (lies[NEXT], lies[SUBJECT]) == (1, 1)
        assert len(door.handler.works) == 1
        door.opened.set()
        await until_gone(ctx.bus)
    await until(lambda: lines.outcomes("prefill") == ["let in"])
    assert (stage.num_running, stage.num_waiting) == (0, 0)


async def test_what_waits_takes_no_place_from_work(ctx: StageContext, until: Until) -> None:
    """With two places ten messages can wait; beyond the most that may, the others stay in the
    queue."""
    door = Door()
    for _ in range(12):
        await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    stage = make_stage(ctx, door.handler, concurrency=2, max_waiting=10)
    async with running(stage):
        await until(lambda: stage.num_waiting == 10)
        assert len(door.handler.works) == 10
        door.opened.set()
        await until_gone(ctx.bus)
    assert len(door.handler.works) == 12


async def test_what_waits_past_its_deadline_expires(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until
) -> None:
    """Its client hears it, and it is taken out of the queue."""
    door, request_id = Door(), new_id()
    soon = ctx.bus.now_unix_ms() + 300
    await send(ctx.bus, SUBJECT, prefill_task(request_id), deadline_unix_ms=soon)
    async with running(make_stage(ctx, door.handler)):
        await until_gone(ctx.bus)
        await until(lambda: lines.outcomes("prefill") == ["expired"])
    assert ear.end(READER, request_id) == Expired(request_id=request_id)
    assert door.num_cancelled == 1


async def test_what_waits_may_be_refused_in_the_end(
    ctx: StageContext, ear: Ear, until: Until
) -> None:
    """An error after the waiting is told like one before it."""

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        async def then() -> Handled:
            raise InvalidRequest("no more", param="model")

        return Handled(outcome="waits", then=then)

    request_id = new_id()
    await send(ctx.bus, SUBJECT, prefill_task(request_id))
    async with running(make_stage(ctx, Handler(answer))):
        await until(lambda: ear.end(READER, request_id))
        await until_gone(ctx.bus)
    end = ear.end(READER, request_id)
    assert isinstance(end, StreamError)
    assert end.error.message == "no more"


async def test_a_stopped_stage_gives_back_what_waits(
    ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """Another process has it at once, and not when an ack is overdue; what is in work is
    finished."""
    door, others, busy = Door(), Handler(), asyncio.Event()
    waiting, working = prefill_task(new_id()), prefill_task(new_id())

    async def answer(work: Work[PrefillTask], call: int) -> Handled:
        if work.message == working:
            await busy.wait()
            return DONE
        return await door.answer(work, call)

    await send(ctx.bus, SUBJECT, waiting)
    await send(ctx.bus, SUBJECT, working)
    stage: Stage[PrefillTask] = make_stage(ctx, Handler(answer))
    async with running(stage) as first:
        await until(lambda: stage.num_waiting == 1 and stage.num_running == 2)
        stage.stop()
        await until(lambda: door.num_cancelled == 1)
        async with running(make_stage(ctx, others)):
            await until(lambda: others.ids == [waiting.request_id])
            assert not first.done()
            busy.set()
            await until(first.done)
            await until_gone(ctx.bus)
    assert sorted(lines.outcomes("prefill")) == ["cut_off", "done", "done"]
