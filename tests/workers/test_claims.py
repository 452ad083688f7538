"""Claims: made once, owed until they are settled, through outages of the bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from infra.bus import WORK, Bus
from pipeline.claim_chain import ClaimChain
from pipeline.stage import Work
from schemas import subjects
from schemas.errors import BusUnavailable, DeadlineExceeded, EngineFailed, NoCapacity, SchemaError
from schemas.headers import WorkHeaders
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Claim, StreamError
from tests.workers.workplace import SERVED, Workplace, log
from workers import claims as module
from workers.claims import Claimed, Claims


@dataclass
class Office:
    """A worker id's claims, and how often something was settled."""

    claims: Claims
    bus: Bus
    settled: list[None] = field(default_factory=list)


async def office(place: Workplace, worker: str = "w-1") -> Office:
    bus = await place.connect("worker")
    settled: list[None] = []
    claims = Claims(bus, ClaimChain(bus), worker, log, on_settled=lambda: settled.append(None))
    return Office(claims, bus, settled)


def task_of(
    record: RequestRecord, epoch: int = 1, after_seq: int = 0, *, is_inline: bool = True
) -> Work[PrefillTask]:
    return Work(
        subject=subjects.prefill(SERVED),
        message=PrefillTask(
            request_id=record.request_id,
            epoch=epoch,
            after_seq=after_seq,
            reader=record.reader,
            record=record if is_inline else None,
        ),
        headers=WorkHeaders(
            schema="prefill-task/1",
            request_id=record.request_id,
            epoch=epoch,
            deadline_unix_ms=record.deadline_unix_ms,
            traceparent="trace",
        ),
    )


async def claimed_by(at: Office, record: RequestRecord) -> Claimed:
    claimed = await at.claims.claim(task_of(record), record, "prefill")
    assert claimed is not None
    return claimed


@asynccontextmanager
async def broker_away(place: Workplace) -> AsyncIterator[None]:
    """Killed inside, started again at the end."""
    await place.broker.kill()
    yield
    await place.restart_broker()


# -- making claims -----------------------------------------------------------------------------


async def test_a_claim_says_how_much_it_is_about(place: Workplace) -> None:
    """The prompt, and what may follow over all choices: routers predict with it."""
    at = await office(place)
    record = await place.record(n=2, max_tokens=7)
    await claimed_by(at, record)
    entry = (await at.claims.chain.tip(record.reader, record.request_id)).entry
    assert isinstance(entry, Claim)
    assert entry.num_tokens == len(record.prompt_ids) // 4
    assert entry.max_tokens == 14


async def test_one_of_many_workers_wins(place: Workplace) -> None:
    """The others hear that the task is out of date, and owe nothing."""
    offices = [await office(place, f"w-{number}") for number in range(5)]
    record = await place.record()
    async with asyncio.TaskGroup() as tasks:
        made = [
            tasks.create_task(one.claims.claim(task_of(record), record, "prefill"))
            for one in offices
        ]
    (winner,) = [task.result() for task in made if task.result() is not None]
    assert sum(one.claims.num_owed for one in offices) == 1
    tip = await place.chain.tip(record.reader, record.request_id)
    assert (tip.seq, winner.traceparent) == (winner.seq, "trace")


async def test_a_task_of_the_past_is_not_claimed(place: Workplace) -> None:
    """A claim builds upon exactly the entry that its task names."""
    at = await office(place)
    record = await place.record()
    seq = await place.dead_claim(record, 1, 0)
    assert await at.claims.claim(task_of(record), record, "prefill") is None
    assert await at.claims.claim(task_of(record, 2, seq - 1), record, "prefill") is None
    assert await at.claims.claim(task_of(record, 2, seq), record, "prefill") is not None


async def test_a_lost_answer_is_asked_for_until_it_comes(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored with the answer lost, twice: one claim stands, and its owner knows."""
    at = await office(place)
    record = await place.record()
    publish, num_lost = at.bus.publish_stored, 0

    async def publish_stored(subject: str, *args: object, **fields: object) -> object:
        nonlocal num_lost
        stored = publish(subject, *args, **fields)  # type: ignore[arg-type]
        if num_lost < 2:
            num_lost += 1
            try:
                await stored
            finally:
                raise BusUnavailable("lost")
        return await stored

    monkeypatch.setattr(at.bus, "publish_stored", publish_stored)
    claimed = await claimed_by(at, record)
    tip = await place.chain.tip(record.reader, record.request_id)
    assert (tip.seq, num_lost) == (claimed.seq, 2)


async def test_a_claim_waits_for_the_broker(place: Workplace) -> None:
    """Away when it is made: it is made when the broker is back."""
    at = await office(place)
    record = await place.record()
    async with asyncio.TaskGroup() as tasks:
        async with broker_away(place):
            making = tasks.create_task(claimed_by(at, record))
            await asyncio.sleep(0)
            assert not making.done()
    assert at.claims.owes(making.result())


async def test_a_claim_ends_waiting_with_the_request(place: Workplace) -> None:
    """Beyond the deadline nobody wants it; nothing is owed."""
    at = await office(place)
    record = await place.record(deadline_s=0.3)
    async with broker_away(place):
        with pytest.raises(DeadlineExceeded):
            await at.claims.claim(task_of(record), record, "prefill")
    assert at.claims.num_owed == 0


# -- deliveries --------------------------------------------------------------------------------


async def test_one_delivery_of_a_task_is_in_work_at_a_time(place: Workplace) -> None:
    """The second is told to come later, as the first may still fail; after a failure it is the
    first again, after the claim a repeat, also when nothing is owed any more."""
    at = await office(place)
    record = await place.record()
    task = task_of(record).message
    with at.claims.attempt(task) as is_first:
        assert is_first
        with pytest.raises(NoCapacity), at.claims.attempt(task):
            raise AssertionError("two at once")
        with at.claims.attempt(task_of(record, 2).message) as is_first:
            assert is_first  # another epoch is another task
    with pytest.raises(EngineFailed), at.claims.attempt(task):
        raise EngineFailed("before the claim")
    with at.claims.attempt(task) as is_first:
        assert is_first
        claimed = await claimed_by(at, record)
    with at.claims.attempt(task) as is_first:
        assert not is_first
    at.claims.settle(claimed)
    with at.claims.attempt(task) as is_first:
        assert not is_first


async def test_who_may_have_been_given_up_takes_no_task(place: Workplace) -> None:
    """One that has just woken leaves it to others; it may again when it knows that it is there."""
    is_present = False
    claims = Claims(
        await place.connect("worker"), ClaimChain(place.bus), "w-1", log,
        may_claim=lambda: is_present,
    )  # fmt: skip
    task = task_of(await place.record()).message
    with pytest.raises(NoCapacity), claims.attempt(task):
        raise AssertionError("taken")
    is_present = True
    with claims.attempt(task) as is_first:
        assert is_first


async def test_the_memory_of_claims_is_bounded(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are forgotten first."""
    monkeypatch.setattr(module, "_REMEMBERED", 3)
    at = await office(place)
    records = [await place.record() for _ in range(5)]
    for record in records:
        await claimed_by(at, record)
    assert len(at.claims._made) == 3
    with at.claims.attempt(task_of(records[-1]).message) as is_first:
        assert not is_first


async def test_the_record_comes_with_the_task_or_from_the_stream(place: Workplace) -> None:
    """And a task without any is no request of ours."""
    at = await office(place)
    record = await place.record()
    for is_inline in (True, False):
        task = task_of(record, is_inline=is_inline).message
        assert await at.claims.record_of(task) == record
    with pytest.raises(SchemaError, match="no record"):
        await at.claims.record_of(
            PrefillTask(request_id="x" * 32, epoch=1, after_seq=0, reader=record.reader)
        )


# -- what is owed ------------------------------------------------------------------------------


async def test_what_is_settled_is_settled_once(place: Workplace) -> None:
    """Twice is fine, and tells nobody twice."""
    at = await office(place)
    claimed = await claimed_by(at, await place.record(n=3))
    assert at.claims.owed() == [claimed]
    assert at.claims.num_choices == 3
    at.claims.settle(claimed)
    at.claims.settle(claimed)
    assert not at.claims.owes(claimed)
    assert len(at.settled) == 1


EndIt = Callable[[Claims, Claimed], Awaitable[None]]
WAYS: dict[str, EndIt] = {
    "give back": lambda claims, claimed: claims.give_back(claimed, "a reason"),
    "fail": lambda claims, claimed: claims.fail(claimed, EngineFailed("a reason")),
}


@pytest.mark.parametrize("end", WAYS.values(), ids=WAYS)
async def test_an_end_waits_for_the_broker(place: Workplace, end: EndIt) -> None:
    """Owed until the broker has the word, then not any more."""
    at = await office(place)
    claimed = await claimed_by(at, await place.record())
    async with asyncio.TaskGroup() as tasks:
        async with broker_away(place):
            tasks.create_task(end(at.claims, claimed))
            await asyncio.sleep(0.05)
            assert at.claims.owes(claimed)
    assert not at.claims.owes(claimed)
    assert await _was_told(place, claimed)
    await place.bus.api(f"STREAM.PURGE.{WORK}")


@pytest.mark.parametrize("end", WAYS.values(), ids=WAYS)
async def test_past_the_deadline_the_end_is_the_routers(place: Workplace, end: EndIt) -> None:
    """Nothing is owed, although nothing could be said."""
    at = await office(place)
    claimed = await claimed_by(at, await place.record(deadline_s=0.5))
    async with broker_away(place):
        async with asyncio.timeout(60):
            await end(at.claims, claimed)
        assert not at.claims.owes(claimed)
    assert not await _was_told(place, claimed)


@pytest.mark.parametrize("end", WAYS.values(), ids=WAYS)
async def test_what_is_not_owed_is_not_ended(place: Workplace, end: EndIt) -> None:
    """Cancelled meanwhile: no task and no error for a request that has ended."""
    at = await office(place)
    claimed = await claimed_by(at, await place.record())
    at.claims.settle(claimed)
    await end(at.claims, claimed)
    assert not await _was_told(place, claimed)


async def test_what_is_given_back_is_the_next_epoch_on_top_of_our_claim(place: Workplace) -> None:
    """However often: the broker has one task."""
    at, other = await office(place), await office(place, "w-2")
    record = await place.record()
    claimed = await claimed_by(at, record)
    await at.claims.give_back(claimed, "a reason")
    at.claims._owed[claimed.key] = claimed
    await at.claims.give_back(claimed, "again")
    assert await place.num_queued() == 1
    next_work = task_of(record, 2, claimed.seq)
    assert await other.claims.claim(next_work, record, "prefill") is not None
    await place.bus.api(f"STREAM.PURGE.{WORK}")


async def test_an_error_of_a_request_that_went_on_is_void(place: Workplace) -> None:
    """Another worker claimed it meanwhile: our failure does not end it."""
    at = await office(place)
    record = await place.record()
    claimed = await claimed_by(at, record)
    seq = await place.dead_claim(record, 2, claimed.seq)
    await at.claims.fail(claimed, EngineFailed("ours"))
    tip = await place.chain.tip(record.reader, record.request_id)
    assert tip.seq == seq
    assert isinstance(tip.entry, Claim)
    assert at.claims.num_owed == 0


async def _was_told(place: Workplace, claimed: Claimed) -> bool:
    """Whether the broker has an error or a task of this claim."""
    tip = await place.chain.tip(claimed.reader, claimed.record.request_id)
    return isinstance(tip.entry, StreamError) or bool(await place.num_queued())
