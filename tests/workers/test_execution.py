"""Execution: what the engine reports becomes the stream, request by request."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from infra.bus import TOKENS, replay
from schemas import subjects
from schemas.codec import encode
from schemas.errors import BusUnavailable
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Claim, StreamEnd, StreamError, TokenBatch, decode_stream_message
from tests.workers.workplace import (
    PATIENCE_S,
    PROMPT,
    READER,
    SERVED,
    Worker,
    Workplace,
    is_claim,
    until,
)
from workers.engine.api import EngineApi, EngineRequest, StepReport, TokenOutput


async def batches(place: Workplace, reader: str = READER) -> list[TokenBatch]:
    stored = replay(place.bus, TOKENS, subjects.token_stream(reader))
    decoded = [decode_stream_message(message.data) async for message in stored]
    return [batch for batch in decoded if isinstance(batch, TokenBatch)]


async def both(place: Workplace, **fields: Any) -> Worker:
    worker = await place.worker("b", "both", **fields)
    await until(lambda: worker.incarnations)
    return worker


async def test_one_step_is_one_message_per_reader(place: Workplace) -> None:
    """Requests that run together share their readers' messages, and no reader sees another's."""
    worker = await both(place)
    worker.runner.gate.clear()
    mine = [await place.ask([10 + number], max_tokens=6) for number in range(3)]
    other = await place.ask([20], max_tokens=6, reader="alice.tests")
    await until(lambda: worker.owed == 4)
    worker.runner.open()
    for record in [*mine, other]:
        await place.answer(record)
    ids = {record.request_id for record in mine}
    shared = await batches(place)
    assert {delta.request_id for batch in shared for delta in batch.deltas} == ids
    assert len(shared) <= worker.runner.num_steps
    assert max(len(batch.deltas) for batch in shared) >= 3
    alone = await batches(place, "alice.tests")
    assert {delta.request_id for batch in alone for delta in batch.deltas} == {other.request_id}


async def steps_while_nobody_listens(worker: Worker, count: int) -> None:
    """Let the engine make ``count`` steps whose reports wait for the loop."""
    wanted = worker.runner.num_steps + count
    worker.runner.open()
    ends_s = time.monotonic() + PATIENCE_S
    while worker.runner.num_steps < wanted:
        assert time.monotonic() < ends_s
        time.sleep(0.001)  # noqa: ASYNC251 - the loop is to be busy


async def test_steps_that_are_over_go_out_together(place: Workplace) -> None:
    """A loop that was busy sends what waits in one message: one delta per request, in order, that
    tells its tokens apart."""
    worker = await both(place)
    worker.runner.gate.clear()
    record = await place.ask(max_tokens=20)
    await until(lambda: worker.runner.is_waiting)
    await steps_while_nobody_listens(worker, 10)
    place.check(record, await place.answer(record))
    deltas = [delta for batch in await batches(place) for delta in batch.deltas]
    assert max(len(delta.ids) for delta in deltas) >= 9
    singles = [one for delta in deltas for one in delta.split()]
    assert [(one.number, len(one.ids)) for one in singles] == [(i, 1) for i in range(20)]
    assert [bool(one.finish_reason) for one in singles] == [False] * 19 + [True]


async def test_choices_have_deltas_of_their_own(place: Workplace) -> None:
    """Tokens of several steps are told per choice."""
    worker = await both(place)
    worker.runner.gate.clear()
    record = await place.ask(max_tokens=20, n=3)
    await until(lambda: worker.runner.is_waiting)
    await steps_while_nobody_listens(worker, 10)
    place.check(record, await place.answer(record))
    deltas = [delta for batch in await batches(place) for delta in batch.deltas]
    for index in range(3):
        mine = [delta for delta in deltas if delta.index == index]
        assert max(len(delta.ids) for delta in mine) >= 9
        assert [one.number for delta in mine for one in delta.split()] == list(range(20))


async def test_what_does_not_fit_one_message_goes_in_several(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that wait together may be too much for the broker."""
    worker = await both(place)
    monkeypatch.setattr(worker.ctx.bus, "fits", lambda data: len(data) < 170)
    worker.runner.gate.clear()
    record = await place.ask(max_tokens=20)
    await until(lambda: worker.runner.is_waiting)
    await steps_while_nobody_listens(worker, 10)
    place.check(record, await place.answer(record))
    stored = await batches(place)
    assert sum(len(delta.ids) for batch in stored for delta in batch.deltas) == 20
    assert all(len(encode(batch)) < 170 for batch in stored)
    assert len(stored) > 2


async def test_the_end_is_stored_after_every_token(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StreamEnd waits until the tokens are confirmed, however often that fails."""
    worker = await both(place)
    writer = worker.now._writer
    flush, num_failures = writer.flush, 0

    async def flush_at_last(timeout_s: float) -> None:
        nonlocal num_failures
        if num_failures < 3:
            num_failures += 1
            raise BusUnavailable("not confirmed")
        await flush(timeout_s)
        assert writer.num_unconfirmed == 0

    monkeypatch.setattr(writer, "flush", flush_at_last)
    record = await place.ask()
    place.check(record, await place.answer(record))
    assert num_failures == 3


async def test_nobody_waits_for_the_end_of_another(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request's end hangs: the tokens of the others go on."""
    worker = await both(place)
    append, may_end = worker.now._claims.chain.append, asyncio.Event()
    stuck: list[str] = []

    async def append_later(reader: str, entry: Any, after_seq: int) -> int | None:
        if isinstance(entry, StreamEnd) and not stuck:
            stuck.append(entry.request_id)
            await may_end.wait()
        return await append(reader, entry, after_seq)

    monkeypatch.setattr(worker.now._claims.chain, "append", append_later)
    first = await place.ask(max_tokens=1)
    await until(lambda: stuck)
    second = await place.ask()
    place.check(second, await place.answer(second))
    may_end.set()
    place.check(first, await place.answer(first))


async def test_an_end_that_comes_too_late_is_void(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker claimed the request before its end was stored: the chain has no end of ours,
    and nothing is owed."""
    worker = await both(place)
    worker.runner.gate.clear()
    record = await place.ask(max_tokens=2)
    seq = await place.until_tip(record, is_claim)
    await until(lambda: worker.runner.is_waiting)
    seq = await place.dead_claim(record, 2, seq)
    worker.runner.open()
    await until(lambda: worker.owed == 0)
    assert (await place.chain.tip(record.reader, record.request_id)).seq == seq
    assert (await place.stored(record)).deltas == ()


async def test_a_full_ring_holds_the_tokens_back(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the broker away and the ring full nothing is lost: the answer is complete later."""
    worker = await both(place)
    worker.now._writer._max_batches = 1
    worker.runner.close_after(1)
    record = await place.ask(max_tokens=20)
    await place.until_tip(record, is_claim)
    await until(lambda: worker.runner.is_waiting)
    await place.broker.kill()
    worker.runner.open()
    await until(lambda: worker.now._writer.is_full)
    await place.restart_broker()
    place.check(record, await place.answer(record))


async def test_an_engine_that_does_not_answer_gives_the_request_back(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes too long: another worker may be quicker. Nobody is told an error."""
    worker = await both(place)
    worker.runner.gate.clear()
    running = await place.ask(max_tokens=3)
    await until(lambda: worker.runner.is_waiting)
    monkeypatch.setattr("workers.execution._ADD_S", 0.1)
    late = await place.ask([50, 51], max_tokens=3)
    await place.until_tip(late, lambda entry: isinstance(entry, Claim) and entry.epoch > 1)
    monkeypatch.undo()
    worker.runner.open()
    place.check(running, await place.answer(running))
    answer = await place.answer(late)
    place.check(late, answer, [50, 51])
    assert len(answer.claims) > 1


async def test_a_request_that_contradicts_itself_ends_alone(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine says to it, the worker lives on and others are served."""
    worker = await both(place)
    add = worker.engine.add

    def odd(request: Any) -> None:
        if request.prompt_ids == (99,):
            raise KeyError("a bug that only this request meets")
        add(request)

    monkeypatch.setattr(worker.engine, "add", odd)
    bad, good = await place.ask([99]), await place.ask()
    terminal = (await place.answer(bad)).view.terminal
    assert isinstance(terminal, StreamError)
    assert terminal.error.code == "engine_failed"
    place.check(good, await place.answer(good))
    await worker.host.thread.call(lambda engine: engine.check_invariants())


async def test_tokens_of_what_was_dropped_are_not_published(place: Workplace) -> None:
    """A report that was under way when the request was given up says nothing."""
    worker = await both(place)
    worker.runner.gate.clear()
    record = await place.ask()
    await until(lambda: worker.runner.is_waiting)
    (claimed,) = worker.now._claims.owed()
    worker.now.execution.drop(claimed)
    report = StepReport(
        outputs=[TokenOutput(key=claimed.key, index=0, number=0, token_id=5, text="x")]
    )
    worker.now.execution.on_report(report)
    worker.runner.open()
    await worker.now._claims.give_back(claimed, "dropped in a test")
    answer = await place.answer(record)
    place.check(record, answer)
    assert [delta.epoch for delta in answer.deltas] == [2] * 12


async def test_tokens_wait_for_those_that_somebody_waits_for(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a message the next ones rest, unless a first token or an end is among them: an engine
    of very short steps sends a first token, and the others with the end."""
    monkeypatch.setattr("workers.execution._REST_S", 1e6)
    await both(place)
    for _ in range(2):
        record = await place.ask()
        answer = await place.answer(record)
        place.check(record, answer)
        mine = [
            batch
            for batch in await batches(place)
            if batch.deltas[0].request_id == record.request_id
        ]
        assert 1 <= len(mine) <= 2


async def test_usage_counts_what_each_worker_found_in_its_cache(place: Workplace) -> None:
    """Cached prompt tokens, never more than the prompt has."""
    await both(place)
    records: list[RequestRecord] = []
    for _ in range(2):
        records.append(await place.ask())
        await place.answer(records[-1])
    first, second = [await place.answer(record) for record in records]
    assert first.end.usage.cached_tokens == 0
    assert second.end.usage.cached_tokens == len(PROMPT) - 1


async def test_the_engine_is_told_who_overtakes(place: Workplace) -> None:
    """Whoever placed a request decides that, and says so with its task."""
    worker = await both(place)
    told: dict[str, bool] = {}
    add = worker.engine.add

    def note(request: EngineRequest) -> None:
        told[request.key] = request.overtakes
        add(request)

    worker.engine.add = note  # type: ignore[method-assign]
    records = [await place.record([10 + number]) for number in range(2)]
    for record, overtakes in zip(records, (False, True), strict=True):
        task = PrefillTask(
            request_id=record.request_id,
            epoch=1,
            after_seq=0,
            reader=record.reader,
            record=record,
            overtakes=overtakes,
        )
        await place.place_task(task, subjects.prefill(SERVED), record.deadline_unix_ms)
        await place.answer(record)
    assert [told[f"{record.request_id}.1"] for record in records] == [False, True]


async def test_what_is_not_owed_any_more_is_not_started(place: Workplace) -> None:
    """Ended between claim and start: its blocks go back, the engine never sees it."""
    worker = await both(place)
    record = await place.record()
    execution, claims = worker.now.execution, worker.now._claims
    seen: list[str] = []
    add = worker.engine.add
    worker.engine.add = lambda request: (seen.append(request.key), add(request))[1]  # type: ignore[method-assign,func-returns-value]
    worker.runner.gate.clear()
    await place.place(record)
    await until(lambda: seen)
    (claimed,) = claims.owed()
    execution.drop(claimed)
    claims.settle(claimed)

    def reserve(engine: EngineApi) -> Any:
        return engine.reserve(claimed.key, 8)

    worker.runner.open()
    await until(lambda: not worker.engine.has_work())
    assert await worker.host.thread.call(reserve)
    await execution.start(claimed)
    await place.until_idle()
    assert seen == [claimed.key]
