"""Every message ends in exactly one of: what comes next, the end of its request, another
delivery, a dead letter."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.bus import (
    Bus,
    EmbeddedBroker,
    Limits,
    ObjectBox,
    WorkMessage,
    any_consumer,
    ensure_topology,
    waiting_work,
)
from infra.times import Times
from pipeline.stage import CRASH_LIMIT, Handled, Outgoing, Stage, StageContext, Work, parse_as
from schemas import subjects
from schemas.codec import encode, tag_of
from schemas.errors import InvalidRequest, KvLost, NoCapacity, QueueFull
from schemas.headers import WorkHeaders
from schemas.prefill import PrefillTask
from schemas.tokens import Accepted, Expired, StreamError
from tests.conftest import Until
from tests.infra.test_steady import break_metrics
from tests.pipeline.rig import (
    READER,
    SERVED,
    TRACE,
    Ear,
    LogLines,
    kv_ready,
    new_id,
    prefill_task,
    record,
    running,
    send,
    stage_context,
    store,
)

SUBJECT = subjects.prefill(SERVED)
NEXT = subjects.kv_ready(SERVED)
DONE = Handled(outcome="done")

Answer = Callable[[Work[PrefillTask], int], Awaitable[Handled]]


class Handler:
    """Gives ``answer(work, number of the call)``; remembers what it was asked."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.works: list[Work[PrefillTask]] = []
        self._answer = answer

    async def __call__(self, work: Work[PrefillTask]) -> Handled:
        self.works.append(work)
        return await self._answer(work, len(self.works)) if self._answer else DONE

    @property
    def ids(self) -> list[str]:
        return [work.message.request_id for work in self.works]


def make_stage(ctx: StageContext, handler: Handler, **more: Any) -> Stage[PrefillTask]:
    consumer = any_consumer("prefill", SERVED, ctx.bus.times)
    return Stage(
        ctx,
        "prefill",
        consumer,
        parse_as(PrefillTask),
        more.pop("reader_of", lambda task: task.reader),
        handler,
        **more,
    )


def then_kv_ready(work: Work[PrefillTask]) -> Handled:
    request_id = work.message.request_id
    following = Outgoing(
        subject=NEXT, message=kv_ready(request_id), msg_id=f"{request_id}.kv-ready.1", epoch=1
    )
    return Handled(outcome="done", publish=(following,))


async def is_gone(bus: Bus, subject: str = SUBJECT) -> bool:
    return subject not in await waiting_work(bus)


async def until_gone(bus: Bus, subject: str = SUBJECT) -> None:
    async with asyncio.timeout(60):
        while not await is_gone(bus, subject):
            pass


async def test_what_comes_next_is_stored_before_the_ack(
    ctx: StageContext, lines: LogLines, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies between the two leaves the work where it was."""
    lay_there: list[bool] = []
    ack = WorkMessage.ack

    async def look_then_ack(message: WorkMessage) -> None:
        lay_there.append(not await is_gone(ctx.bus, NEXT))
        await ack(message)

    monkeypatch.setattr(WorkMessage, "ack", look_then_ack)

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        return then_kv_ready(work)

    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    async with running(make_stage(ctx, Handler(answer))):
        await until_gone(ctx.bus)
    assert lay_there == [True]
    await until(lambda: lines.outcomes("prefill") == ["done"])


async def test_an_outcome_that_is_told_elsewhere_has_no_line_here(
    ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """A request has one line per process; what is not the usual outcome is told at once."""

    async def answer(work: Work[PrefillTask], number: int) -> Handled:
        if number == 1:
            raise NoCapacity("full")
        return DONE

    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    handler = Handler(answer)
    stage = make_stage(ctx, handler, told_elsewhere=("done",))
    async with running(stage):
        await until(lambda: len(handler.works) == 2 and not stage.num_running)
    assert lines.outcomes("prefill") == ["later"]


async def test_headers_go_on_with_the_request(ctx: StageContext, ear: Ear, until: Until) -> None:
    """The next message can be judged by its headers: same request, deadline and trace."""

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        return then_kv_ready(work)

    request_id, deadline = new_id(), ctx.bus.now_unix_ms() + 5000
    handler = Handler(answer)
    await send(ctx.bus, SUBJECT, prefill_task(request_id), deadline_unix_ms=deadline)
    async with running(make_stage(ctx, handler)):
        await until(lambda: ear.on(NEXT))
    assert handler.works[0].headers.traceparent == TRACE
    headers = WorkHeaders.from_dict(ear.on(NEXT)[0].headers)
    assert headers == WorkHeaders(
        schema="kv-ready/1",
        request_id=request_id,
        epoch=1,
        deadline_unix_ms=deadline,
        traceparent=TRACE,
    )


async def test_broken_metrics_stop_no_stage(
    ctx: StageContext, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call raises, and message after message is handled."""
    break_metrics(monkeypatch)
    handler = Handler()
    ids = [new_id() for _ in range(3)]
    for request_id in ids:
        await send(ctx.bus, SUBJECT, prefill_task(request_id))
    async with running(make_stage(ctx, handler)):
        await until_gone(ctx.bus)
    assert handler.ids == ids


async def test_handled_twice_is_published_once(ctx: StageContext, ear: Ear, until: Until) -> None:
    """The broker drops the second one by its message id; messages to readers carry no headers."""

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        request_id = work.message.request_id
        accepted = Accepted(
            request_id=request_id,
            model="tiny",
            revision="r1",
            prompt_tokens=1,
            max_tokens=1,
            admitted_unix_ms=1,
            deadline_unix_ms=2,
        )
        told = Outgoing(
            subject=subjects.token_stream(READER), message=accepted, msg_id=f"{request_id}.told"
        )
        return Handled(outcome="done", publish=(*then_kv_ready(work).publish, told))

    task, handler = prefill_task(new_id()), Handler(answer)
    await send(ctx.bus, SUBJECT, task)
    await send(ctx.bus, SUBJECT, task)
    async with running(make_stage(ctx, handler)):
        await until(lambda: len(handler.works) == 2)
        await until_gone(ctx.bus)
    assert (await waiting_work(ctx.bus))[NEXT] == 1
    assert len(ear.stream(READER, task.request_id)) == 1
    told = ear.on(subjects.token_stream(READER))[0]
    assert "Mesh-Schema" not in (told.headers or {})


@pytest.mark.parametrize("error", [NoCapacity("full"), KvLost("gone")])
async def test_retryable_errors_come_again(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until, error: Exception
) -> None:
    """No room now is no end: it comes again after a pause, and its client hears nothing."""

    async def answer(_: Work[PrefillTask], call: int) -> Handled:
        if call < 3:
            raise error
        return DONE

    request_id = new_id()
    await send(ctx.bus, SUBJECT, prefill_task(request_id))
    async with running(make_stage(ctx, Handler(answer))):
        await until(lambda: lines.outcomes("prefill") == ["later", "later", "done"])
        await until_gone(ctx.bus)
    assert [e["delivery"] for e in lines.events("stage_handled")] == [1, 2, 3]
    assert ear.stream(READER, request_id) == []


async def test_other_errors_of_ours_end_the_request(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until
) -> None:
    """What can't go better later is told to the client, once, and is no dead letter."""

    async def answer(_: Work[PrefillTask], __: int) -> Handled:
        raise InvalidRequest("not like this", param="top_p")

    request_id = new_id()
    await send(ctx.bus, SUBJECT, prefill_task(request_id, epoch=1))
    async with running(make_stage(ctx, Handler(answer))):
        await until(lambda: ear.end(READER, request_id))
        await until_gone(ctx.bus)
    error = InvalidRequest("not like this", param="top_p").info
    assert ear.end(READER, request_id) == StreamError(request_id=request_id, epoch=1, error=error)
    assert lines.outcomes("prefill") == ["refused"]
    assert ear.letters() == []


async def test_a_crash_is_tried_again(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until
) -> None:
    """A bug that shows once costs its request a pause, not an answer."""

    async def answer(_: Work[PrefillTask], call: int) -> Handled:
        if call == 1:
            raise ZeroDivisionError
        return DONE

    request_id = new_id()
    await send(ctx.bus, SUBJECT, prefill_task(request_id))
    async with running(make_stage(ctx, Handler(answer))):
        await until(lambda: lines.outcomes("prefill") == ["crashed", "done"])
    assert len(lines.events("stage_crashed")) == 1
    assert ear.stream(READER, request_id) == []


async def test_a_message_that_crashes_every_time_is_buried(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until
) -> None:
    """Kept whole for a person; its client is told; everybody else's work goes on."""
    bad, good = prefill_task(new_id()), prefill_task(new_id())

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        if work.message == bad:
            raise ZeroDivisionError
        return DONE

    await send(ctx.bus, SUBJECT, bad)
    handler = Handler(answer)
    async with running(make_stage(ctx, handler)):
        await send(ctx.bus, SUBJECT, good)
        await until(lambda: ear.end(READER, bad.request_id))
        await until_gone(ctx.bus)
    assert handler.ids.count(bad.request_id) == CRASH_LIMIT
    assert handler.ids.count(good.request_id) == 1
    end = ear.end(READER, bad.request_id)
    assert isinstance(end, StreamError)
    assert end.error.code == "engine_failed"
    (letter,) = ear.letters()
    assert (letter.payload, letter.subject, letter.stage) == (encode(bad), SUBJECT, "prefill")
    assert letter.headers["Mesh-Request"] == bad.request_id
    assert ctx.metrics.dead_letters.labels("prefill")._value.get() == 1


TASK = prefill_task(new_id())
GOOD_HEADERS = WorkHeaders(
    schema=tag_of(PrefillTask), request_id=TASK.request_id, epoch=1, deadline_unix_ms=2**50
).to_dict()
UNUSABLE = {
    "no MessagePack": (b"\xc1\xff garbage", {}),
    "truncated": (encode(TASK)[:-3], {}),
    "empty": (b"", {}),
    "another message": (encode(kv_ready(TASK.request_id)), {}),
    "header of another message": (encode(TASK), {"Mesh-Schema": "kv-ready/1"}),
    "header of another request": (encode(TASK), {"Mesh-Request": "another-request"}),
    "no headers": (encode(TASK), dict.fromkeys(GOOD_HEADERS)),
    "no deadline": (encode(TASK), {"Mesh-Deadline": None}),
    "an epoch that is no number": (encode(TASK), {"Mesh-Epoch": "one"}),
    "an object that is not there": (b"", {"Mesh-Object": "nowhere"}),
    "an object name with wildcards": (b"", {"Mesh-Object": ">"}),
    "a reader that is none": (encode(PrefillTask(request_id=TASK.request_id, epoch=1, after_seq=0,
                                                 reader="nobody")), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
async def test_unusable_messages_are_buried_and_the_stage_lives(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until, case: str
) -> None:
    """Whatever arrives: the message is kept as a dead letter, the next one is handled. The client
    hears of it, since admission has written down who it is."""
    data, changed = UNUSABLE[case]
    headers = {k: v for k, v in (GOOD_HEADERS | changed).items() if v is not None}
    await store(ctx.bus, subjects.request_record(TASK.request_id), record(TASK.request_id))
    await ctx.bus.publish_stored(SUBJECT, data, headers)
    handler, good = Handler(), prefill_task(new_id())
    async with running(make_stage(ctx, handler)):
        await until(ear.letters)
        await send(ctx.bus, SUBJECT, good)
        await until(lambda: handler.works)
        await until_gone(ctx.bus)
    assert handler.ids == [good.request_id]
    assert lines.outcomes("prefill") == ["dead", "done"]
    (letter,) = ear.letters()
    assert letter.payload == data
    assert letter.headers == headers
    assert letter.code in ("schema_error", "object_missing")
    if case not in ("header of another request", "no headers"):
        assert isinstance(ear.end(READER, TASK.request_id), StreamError)


async def test_past_the_deadline_a_request_expires(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until
) -> None:
    """Nobody works on what nobody waits for any more."""
    request_id, handler = new_id(), Handler()
    past = ctx.bus.now_unix_ms() - 1
    await send(ctx.bus, SUBJECT, prefill_task(request_id), deadline_unix_ms=past)
    async with running(make_stage(ctx, handler)):
        await until(lambda: ear.end(READER, request_id))
        await until_gone(ctx.bus)
    assert ear.end(READER, request_id) == Expired(request_id=request_id)
    assert handler.works == []
    assert lines.outcomes("prefill") == ["expired"]


async def test_twice_the_largest_message_goes_by_the_object_store(
    tmp_path: Path, times: Times, lines: LogLines, until: Until
) -> None:
    """A payload over the broker's limit arrives whole, and so does the one that follows from it."""
    async with EmbeddedBroker(tmp_path, max_payload=256 << 10) as broker:
        async with await Bus.connect(broker.url("control"), role="control", times=times) as bus:
            await ensure_topology(bus)
            ctx = stage_context(bus, lines)
            big = record(new_id())
            ids = bytes(range(256)) * 4 * (2 * bus.max_payload // 1024)
            task = PrefillTask(
                request_id=big.request_id,
                epoch=1,
                after_seq=0,
                reader=READER,
                record=msgspec.structs.replace(big, prompt_ids=ids),
            )
            assert len(encode(task)) > 2 * bus.max_payload

            async def answer(work: Work[PrefillTask], _: int) -> Handled:
                again = Outgoing(subject=f"{SUBJECT[:-3]}w2", message=task, msg_id="2", epoch=2)
                return Handled(outcome="done", publish=(again,))

            handler = Handler(answer)
            await send(bus, SUBJECT, task)
            async with running(make_stage(ctx, handler)):
                await until_gone(bus)
            assert handler.works[0].message == task
            assert (await waiting_work(bus))[f"{SUBJECT[:-3]}w2"] == 1


async def test_an_object_that_others_spoiled_is_buried(
    ctx: StageContext, ear: Ear, until: Until
) -> None:
    """The store is open to clients: what they put there may be anything."""
    name = await ObjectBox(ctx.bus).put(encode(TASK))
    described = f"$O.mesh_objects.M.{base64.urlsafe_b64encode(name.encode()).decode()}"
    await ctx.bus.publish_stored(described, b'{"nuid": ">", "size": 1, "digest": ""}')
    await ctx.bus.publish_stored(SUBJECT, b"", GOOD_HEADERS | {"Mesh-Object": name})
    async with running(make_stage(ctx, Handler())):
        await until(ear.letters)
        await until_gone(ctx.bus)
    assert ear.letters()[0].code == "object_missing"


@pytest.mark.parametrize("waits", [True, False])
async def test_a_full_queue_behind_the_stage(
    ctx: StageContext, ear: Ear, lines: LogLines, until: Until, waits: bool
) -> None:
    """Either it is waited for, or the client hears of it in the words of the stage."""
    await ensure_topology(ctx.bus, Limits(queue_msgs=1))
    await store(ctx.bus, NEXT, kv_ready(new_id()))

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        return then_kv_ready(work)

    request_id = new_id()
    await send(ctx.bus, SUBJECT, prefill_task(request_id))
    told = None if waits else lambda task: QueueFull(task.request_id, retry_after_s=3)
    async with running(make_stage(ctx, Handler(answer), when_full=told)):
        if waits:
            await until(lambda: lines.outcomes("prefill")[:2] == ["later", "later"])
            await ctx.bus.api("STREAM.PURGE.MESH_WORK", {"filter": NEXT})
            await until(lambda: lines.outcomes("prefill")[-1] == "done")
            assert ear.stream(READER, request_id) == []
        else:
            await until(lambda: ear.end(READER, request_id))
            end = ear.end(READER, request_id)
            assert isinstance(end, StreamError)
            assert end.error == QueueFull(request_id, retry_after_s=3).info
        await until_gone(ctx.bus)


async def test_what_can_not_even_be_refused_stays_and_the_stage_lives(
    ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """A refusal that fails leaves the message un-acked; it ends neither process nor stage."""
    bad, good = prefill_task(new_id()), prefill_task(new_id())

    async def answer(work: Work[PrefillTask], _: int) -> Handled:
        if work.message == bad:
            raise InvalidRequest("no")
        return DONE

    stage = make_stage(ctx, Handler(answer), reader_of=lambda task: "no reader at all")
    await send(ctx.bus, SUBJECT, bad)
    async with running(stage):
        await until(lambda: lines.outcomes("prefill") == ["failed"])
        await send(ctx.bus, SUBJECT, good)
        await until(lambda: lines.outcomes("prefill") == ["failed", "done"])
        assert (await waiting_work(ctx.bus))[SUBJECT] == 1


async def test_work_in_hand_outlives_the_broker(
    broker: EmbeddedBroker, ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """A broker that restarts delivers again what is in work; it is handled once, then acked."""
    go_on = asyncio.Event()

    async def answer(_: Work[PrefillTask], __: int) -> Handled:
        await go_on.wait()
        return DONE

    handler = Handler(answer)
    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    async with running(make_stage(ctx, handler)) as stage:
        await until(lambda: handler.works)
        await broker.restart()
        await ctx.bus.until_connected(5)
        await send(ctx.bus, SUBJECT, prefill_task(new_id()))
        await until(lambda: len(handler.works) == 2)  # the consumer is back, both were delivered
        go_on.set()
        await until_gone(ctx.bus)
        assert not stage.done()
    assert len(handler.works) == 2
    assert lines.outcomes("prefill") == ["done", "done"]


async def test_a_bus_that_is_away_is_no_failure_of_the_message(
    broker: EmbeddedBroker, ctx: StageContext, lines: LogLines, until: Until
) -> None:
    """What is finished while the broker is away could not be said: it comes again, and is done."""
    is_killed = asyncio.Event()

    async def answer(work: Work[PrefillTask], call: int) -> Handled:
        if call == 1:
            await broker.kill()
            await until(lambda: not ctx.bus.is_connected)
            is_killed.set()
        return then_kv_ready(work)

    handler = Handler(answer)
    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    async with running(make_stage(ctx, handler)):
        await is_killed.wait()
        await until(lambda: lines.outcomes("prefill") == ["bus_away"])
        await broker.restart()
        await until(lambda: lines.outcomes("prefill") == ["bus_away", "done"], 10)
        await until_gone(ctx.bus)
    assert (await waiting_work(ctx.bus))[NEXT] == 1


async def test_work_that_takes_long_is_not_given_to_another(
    ctx: StageContext, until: Until
) -> None:
    """In-progress signs go out while the handler works, beyond the ack wait."""
    slow, quick = Handler(), Handler()
    started = asyncio.get_running_loop().time()
    long_s = 1.5 * ctx.bus.times.ack_wait_s

    async def answer(_: Work[PrefillTask], __: int) -> Handled:
        while asyncio.get_running_loop().time() < started + long_s:
            await asyncio.sleep(0.02)
        return DONE

    slow._answer = answer
    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    async with running(make_stage(ctx, slow)):
        await until(lambda: slow.works)
        async with running(make_stage(ctx, quick)):
            await until_gone(ctx.bus)
    assert (len(slow.works), len(quick.works)) == (1, 0)


async def test_a_stopped_stage_finishes_what_it_took(ctx: StageContext, until: Until) -> None:
    """Nothing new is taken; :meth:`run` returns when the last one is done."""
    go_on = asyncio.Event()

    async def answer(_: Work[PrefillTask], __: int) -> Handled:
        await go_on.wait()
        return DONE

    handler = Handler(answer)
    stage = make_stage(ctx, handler, capacity=lambda: 1 - stage.num_running)
    await send(ctx.bus, SUBJECT, prefill_task(new_id()))
    async with running(stage) as run:
        await until(lambda: stage.num_running == 1)
        await send(ctx.bus, SUBJECT, prefill_task(new_id()))
        stage.stop()
        go_on.set()
        await run
    assert len(handler.works) == 1
    async with asyncio.timeout(60):
        while (await waiting_work(ctx.bus))[SUBJECT] != 1:
            pass


async def test_a_stage_that_is_cut_off_gives_back_what_it_had(
    ctx: StageContext, until: Until
) -> None:
    """To others at once: nobody waits until the broker misses its word."""

    async def never(work: Work[PrefillTask], _: int) -> Handled:
        await asyncio.Event().wait()
        raise AssertionError("it never is")

    consumer = any_consumer("prefill", SERVED, ctx.bus.times).evolve(ack_wait=600.0)
    first, second = Handler(never), Handler()
    stages = [
        Stage(ctx, "prefill", consumer, parse_as(PrefillTask), lambda task: task.reader, handler)
        for handler in (first, second)
    ]
    request_id = new_id()
    await send(ctx.bus, SUBJECT, prefill_task(request_id))
    async with running(stages[0]):
        await until(lambda: first.ids)
    async with running(stages[1]):
        await until(lambda: second.ids == [request_id], 60)
        await until_gone(ctx.bus)
