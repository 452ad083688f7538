from __future__ import annotations

from infra.bus import kv_ready_consumer, waiting_work
from pipeline.fleet import Fleet
from pipeline.router import Router
from pipeline.stage import Stage, StageContext, parse_as
from schemas import subjects
from schemas.codec import decode
from schemas.decode import DecodeTask
from schemas.headers import WorkHeaders
from schemas.kv import KvReady
from tests.conftest import Until
from tests.pipeline.placing import placing
from tests.pipeline.rig import SERVED, TRACE, Ear, beat, kv_ready, new_id, running, send

SUBJECT = subjects.kv_ready(SERVED)


def router(ctx: StageContext, fleet: Fleet) -> Stage[KvReady]:
    handler = Router(ctx, placing(fleet)).handle
    consumer = kv_ready_consumer(ctx.bus.times)
    parse = parse_as(KvReady)
    return Stage(ctx, "kv-ready", consumer, parse, lambda ready: ready.reader, handler)


async def test_a_finished_prefill_becomes_a_decode_task(
    ctx: StageContext, ear: Ear, until: Until
) -> None:
    """For the next epoch on top of the prefill's claim, with the handle as it came."""
    ready = kv_ready(new_id())
    await send(ctx.bus, SUBJECT, ready)
    async with running(router(ctx, Fleet(3.0, 0.0))):
        await until(lambda: ear.on(subjects.decode(SERVED)))
    (message,) = ear.on(subjects.decode(SERVED))
    task = decode(message.data, DecodeTask)
    assert (task.request_id, task.epoch, task.after_seq) == (ready.request_id, 2, ready.after_seq)
    assert (task.reader, task.ready) == (ready.reader, ready)
    headers = WorkHeaders.from_dict(message.headers)
    assert (headers.request_id, headers.epoch, headers.traceparent) == (
        ready.request_id,
        2,
        TRACE,
    )


async def test_the_worker_is_named_when_there_is_a_choice(
    ctx: StageContext, ear: Ear, until: Until
) -> None:
    """Its own queue gets the task."""
    fleet = Fleet(3.0, 0.0)
    fleet.hear(beat("d1", roles=("decode",), num_free_slots=4, num_running=3), 0.0)
    fleet.hear(beat("d2", roles=("decode",), num_free_slots=4), 0.0)
    await send(ctx.bus, SUBJECT, kv_ready(new_id()))
    async with running(router(ctx, fleet)):
        await until(lambda: ear.on(subjects.decode(SERVED, "d2")))


async def test_twice_the_same_prefill_is_one_task(
    ctx: StageContext, ear: Ear, until: Until
) -> None:
    """Two routers, or one that repeats itself: the broker keeps one of the tasks."""
    ready = kv_ready(new_id())
    await send(ctx.bus, SUBJECT, ready)
    await send(ctx.bus, SUBJECT, ready)
    subject = subjects.decode(SERVED)
    async with running(router(ctx, Fleet(3.0, 0.0))), running(router(ctx, Fleet(3.0, 0.0))):
        await until(lambda: len(ear.on(subject)) == 2)
    assert (await waiting_work(ctx.bus))[subject] == 1
