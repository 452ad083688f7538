"""What the engine begins while the claim is being stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from infra.bus import TOKENS, peek, replay
from schemas import subjects
from schemas.codec import decode
from schemas.errors import BusUnavailable
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Claim, StreamError
from tests.workers.workplace import PATIENCE_S, PROMPT, Worker, Workplace, is_claim, until
from workers.ahead import Ahead
from workers.engine.api import EngineRequest, FinishedRequest, StepReport, TokenOutput


class Broker:
    """Between a worker and its first claims: what it writes is on its way, and waits there until a
    test lets it."""

    def __init__(self, worker: Worker) -> None:
        self.chain = worker.now._claims.chain
        self.may_go = asyncio.Event()
        self.num_waiting = 0
        self.fails = 0  # so many answers are lost
        self.is_frozen = False  # then nothing is on its way
        self._open = self.chain.open

    async def open(
        self, record: RequestRecord, claim: Claim, on_written: Callable[[], None] | None = None
    ) -> tuple[int | None, RequestRecord]:
        if on_written is not None and not self.is_frozen:
            on_written()
        self.num_waiting += 1
        await self.may_go.wait()
        self.num_waiting -= 1
        opened = await self._open(record, claim)
        if self.fails:
            self.fails -= 1
            raise BusUnavailable("the answer was lost")
        return opened


@asynccontextmanager
async def slow_claims(
    place: Workplace, role: str = "both", **fields: Any
) -> AsyncIterator[tuple[Worker, Broker]]:
    worker = await place.worker("b", role, **fields)
    await until(lambda: worker.incarnations)
    broker = Broker(worker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker.chain, "open", broker.open)
        try:
            yield worker, broker
        finally:
            worker.runner.open()
            broker.may_go.set()


async def said_to(
    worker: Worker, place: Workplace, prompt_ids: Sequence[int] = PROMPT, **sampling: Any
) -> RequestRecord:
    """A request that comes directly."""
    record = await place.record(prompt_ids, is_stored=False, **sampling)
    await place.say(record, worker)
    return record


async def test_nothing_is_told_before_the_claim_is_stored(place: Workplace) -> None:
    """The engine comes to its end meanwhile; then the whole answer is there, in order."""
    async with slow_claims(place) as (worker, broker):
        record = await said_to(worker, place, max_tokens=12)
        await until(lambda: worker.runner.num_steps >= 12 and not worker.engine.has_work())
        num_steps = worker.runner.num_steps
        assert broker.num_waiting == 1
        assert (await place.stored(record)).deltas == ()
        assert worker.owed == 0
        broker.may_go.set()
        answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill")]
    assert worker.runner.num_steps == num_steps
    await place.until_idle()


async def test_a_claim_that_can_not_leave_begins_nothing(place: Workplace) -> None:
    """What kills its worker is counted: the engine gets no request whose claim may go down with
    this process. It computes when the claim is stored."""
    async with slow_claims(place) as (worker, broker):
        broker.is_frozen = True
        record = await said_to(worker, place, max_tokens=12)
        await until(lambda: broker.num_waiting == 1)
        await asyncio.sleep(0.1)
        assert worker.runner.num_steps == 0
        assert not worker.engine.has_work()
        broker.may_go.set()
        answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill")]
    await place.until_idle()


async def test_what_comes_from_a_queue_begins_when_it_is_claimed(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have killed whoever has claimed it before: computing for a claim that is lost could
    kill one more, whom nobody counts."""
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations)
    record = await place.record()
    await place.dead_claim(record, 1, 0)
    await place.place(record)
    await place.until_queues_empty()
    await place.until_idle()
    assert worker.runner.num_steps == 0


async def test_tokens_before_and_after_the_claim_are_one_answer(place: Workplace) -> None:
    """What was kept comes before what follows."""
    async with slow_claims(place) as (worker, broker):
        worker.runner.close_after(5)
        record = await said_to(worker, place, max_tokens=12, n=2)
        await until(lambda: worker.runner.is_waiting and worker.runner.num_steps == 5)
        broker.may_go.set()
        await place.until_tokens(record, 2)
        worker.runner.open()
        place.check(record, await place.answer(record))


async def test_of_a_claim_that_is_lost_nothing_is_left(place: Workplace) -> None:
    """Another was first: no token is told, and the engine holds nothing."""
    async with slow_claims(place) as (worker, broker):
        record = await said_to(worker, place)
        await until(lambda: broker.num_waiting and worker.runner.num_steps >= 2)
        await place.dead_claim(record, 1, 0)
        broker.may_go.set()
        await place.until_queues_empty()
        await place.until_idle()
        stored = await place.stored(record)
        assert stored.deltas == ()
        assert [entry.worker for entry in stored.chain if isinstance(entry, Claim)] == [
            "dead-worker"
        ]


async def test_a_claim_whose_answer_was_lost_is_made_again(place: Workplace) -> None:
    """It began once, and is told once."""
    async with slow_claims(place) as (worker, broker):
        broker.fails = 1
        broker.may_go.set()
        record = await said_to(worker, place, max_tokens=12)
        answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill")]
    await place.until_idle()


async def test_what_is_held_is_handed_over_after_the_claim(place: Workplace) -> None:
    """A prefill worker may have the first token, and hold the blocks, before it owns them."""
    async with slow_claims(place, "prefill") as (worker, broker):
        place.start_router()
        await place.worker("d", "decode")
        record = await said_to(worker, place, max_tokens=12)
        await until(lambda: worker.runner.num_steps and not worker.engine.has_work())
        assert len(worker.host.leases) == 0
        broker.may_go.set()
        answer = await place.answer(record)
    place.check(record, answer)
    assert answer.claims == [(1, "prefill"), (2, "decode")]
    await place.until_idle()


async def test_an_engine_that_fails_early_fails_the_request_it_owns(place: Workplace) -> None:
    """The client hears of it from who claimed it, not before."""
    async with slow_claims(place) as (worker, broker):
        record = await said_to(worker, place, [worker.runner.POISON, *PROMPT])
        await until(lambda: broker.num_waiting == 1 and not worker.engine.has_work())
        broker.may_go.set()
        answer = await place.answer(record)
        assert isinstance(answer.view.terminal, StreamError)
        assert answer.deltas == ()
        await place.until_idle()


async def test_what_the_engine_does_not_take_is_refused_after_the_claim(place: Workplace) -> None:
    """Too long for its memory: known at once, told when the request is ours."""
    async with slow_claims(place, num_blocks=4) as (worker, broker):
        record = await said_to(worker, place)
        await until(lambda: broker.num_waiting == 1)
        assert (await place.chain.tip(record.reader, record.request_id)).entry is None
        broker.may_go.set()
        await place.until_tip(record, lambda entry: isinstance(entry, StreamError))
        await place.until_idle()


async def test_who_is_fenced_meanwhile_holds_nothing(place: Workplace) -> None:
    """The worker's id ends: what it had begun goes with it, and the next one answers."""
    async with slow_claims(place) as (worker, broker):
        first = worker.now
        worker.runner.close_after(3)
        record = await said_to(worker, place, max_tokens=12)
        await until(lambda: worker.runner.is_waiting and broker.num_waiting == 1)
        first._fence()
        worker.runner.open()
        await until(lambda: worker.now is not first)
        assert not first.execution._ahead
        await place.place(record, is_inline=False)  # as routers do with what dead workers had
        await place.until_tip(record, lambda entry: not is_claim(entry) and entry is not None)
    place.check(record, await place.answer(record))
    await place.until_idle()


async def test_a_record_that_is_not_stored_is_stored_before_the_claim(place: Workplace) -> None:
    """By the worker itself, in one go; the answer is the same."""
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations)
    record = await place.record(is_stored=False)
    await place.say(record, worker)
    place.check(record, answer := await place.answer(record))
    assert answer.claims == [(1, "prefill")]
    found = await place.chain.record(record.request_id)
    claims = replay(place.bus, TOKENS, subjects.chain(record.reader, record.request_id))
    first = await anext(claims)
    await claims.aclose()
    assert found is not None
    assert found[1] == record
    assert found[0] < first.seq
    await place.until_idle()


async def test_a_record_that_was_written_before_is_the_one_that_is_answered(
    place: Workplace,
) -> None:
    """Though the engine had begun another one of this id: nothing of that is told."""
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations)
    stands = await place.record(temperature=1.0, seed=1, max_tokens=12)
    sampling = replace(stands.sampling, seed=2, max_tokens=9)
    await place.say(replace(stands, sampling=sampling), worker)
    answer = await place.answer(stands)
    place.check(stands, answer)
    assert len(answer.tokens()) == 12
    await place.until_idle()


async def test_one_that_was_admitted_for_another_revision_is_left_to_it(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout came between: the claim is ours, the answer is not; what is fetched is let go."""
    bringing = Mock()
    monkeypatch.setattr("workers.prefill.Prefill._bring", lambda *_: bringing)
    worker = await place.worker("b", "both")
    await until(lambda: worker.incarnations)
    record = await place.record(is_stored=False)
    other = replace(record, served="tiny@2", revision="2")
    await place.chain.write_record(other)
    await place.say(record, worker)
    seq = await place.until_tip(record, is_claim)
    queued = peek(place.bus, subjects.prefill("tiny@2"))
    async with asyncio.timeout(PATIENCE_S):
        while not (tasks := [decode(message.data, PrefillTask) async for message in queued]):
            queued = peek(place.bus, subjects.prefill("tiny@2"))
    assert [(task.request_id, task.epoch, task.after_seq) for task in tasks] == [
        (record.request_id, 2, seq)
    ]
    bringing.drop.assert_called_once_with()
    assert (await place.stored(record)).deltas == ()
    await place.until_idle()


async def test_what_is_queued_for_lack_of_room_is_recorded_before(place: Workplace) -> None:
    """Who reads on elsewhere finds it while it waits."""
    worker = await place.worker("b", "both", max_num_sequences=1)
    await until(lambda: worker.incarnations)
    worker.runner.gate.clear()
    await place.say(await place.record(is_stored=False), worker)
    await until(lambda: worker.owed == 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.stage._MAX_IN_LINE", 0)
        record = await place.record(is_stored=False)
        await place.say(record, worker)
        async with asyncio.timeout(PATIENCE_S):
            while await place.num_queued() == 0:
                pass
        found = await place.chain.record(record.request_id)
    assert found is not None
    assert found[1] == record
    worker.runner.open()
    place.check(record, await place.answer(record))
    await place.until_idle()


class Engine:
    """Takes everything."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.num_asked = 0

    def ask(self, function: Any) -> asyncio.Future[None]:
        self.num_asked += 1
        return asyncio.get_running_loop().create_future()

    def release(self, key: str) -> None:
        self.released.append(key)


async def test_others_parts_stay_in_the_report() -> None:
    """Of a report only what is about requests that are being claimed is kept, in order."""
    engine = Engine()
    ahead = Ahead(engine)  # type: ignore[arg-type]
    ahead.plan(EngineRequest(key="mine", prompt_ids=(1,), sampling=None))  # type: ignore[arg-type]
    ahead.begin("mine")
    ahead.begin("mine")
    for number in range(2):
        report = StepReport(
            outputs=[
                TokenOutput(key=key, index=0, number=number, token_id=number, text="")
                for key in ("mine", "other")
            ]
        )
        ahead.keep(report)
        assert [one.key for one in report.outputs] == ["other"]
    end = FinishedRequest(
        key="mine", num_tokens=(2,), finish_reasons=("length",), num_cached_tokens=0
    )
    report = StepReport(finished=[end])
    ahead.keep(report)
    assert report.is_silent
    begun = ahead.take("mine")
    assert begun is not None
    assert engine.num_asked == 1
    assert [one.number for one in begun.report.outputs] == [0, 1]
    assert begun.report.finished == [end]
    ahead.give_up("mine")
    ahead.begin("mine")
    assert engine.released == []
    assert not ahead


async def test_what_was_given_up_does_not_begin() -> None:
    """Its claim was given up before it had left."""
    ahead = Ahead(engine := Engine())  # type: ignore[arg-type]
    ahead.plan(EngineRequest(key="mine", prompt_ids=(1,), sampling=None))  # type: ignore[arg-type]
    assert len(ahead) == 1
    ahead.give_up("mine")
    ahead.begin("mine")
    assert engine.num_asked == 0
    assert not ahead
