"""Requests go when their pool has room, and those that wait are let go one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from infra.metrics import Metrics
from infra.task_scope import task_scope
from pipeline.budget import Budget
from pipeline.door_meter import MAX_TENANTS, OTHER, DoorMeter
from pipeline.doorkeeper import Doorkeeper
from pipeline.fleet import Fleet
from pipeline.placement import PrefillPlace
from pipeline.policy import FixedPolicies
from pipeline.prefix_walk import Found
from pipeline.records import prefill_task
from pipeline.verdict import Admit, Ask, Refuse, Verdict, Wait
from schemas.control import Placed
from schemas.errors import OverBudget
from schemas.kv import KvReady
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from tests.conftest import Until
from tests.pipeline.rig import SERVED, claim, record
from tests.pipeline.test_waiting_room import NOW_S, Told, fleet_of


@dataclass(slots=True)
class Named:
    """A placement that always names one worker."""

    places: list[str] = field(default_factory=list)
    error: Exception | None = None

    def place_prefill(
        self, record: RequestRecord, *, hurries: bool = False, found: Found | None = None
    ) -> PrefillPlace:
        if self.error is not None:
            raise self.error
        self.places.append(record.request_id)
        return PrefillPlace(worker="w1")

    def decode_worker(self, served: str, ready: KvReady) -> str:
        raise NotImplementedError

    def max_sequence_tokens(self, served: str) -> int | None:
        raise NotImplementedError

    @property
    def knows_prefixes(self) -> bool:
        raise NotImplementedError


class Verdicts(Budget):
    """A budget that says what it is told to; Admit otherwise."""

    def __init__(self, fleet: Fleet, forecast: Told) -> None:
        super().__init__(fleet, forecast, FixedPolicies())
        self.verdicts: dict[str, Verdict] = {}

    def judge(self, ask: Ask) -> Verdict:
        return self.verdicts.get(ask.request_id, Admit())


class Rig:
    """A door with one worker behind it, whose wait is told."""

    def __init__(self) -> None:
        self.told = Told({"w1": 10_000.0})
        fleet = fleet_of("w1")
        self.budget = Verdicts(fleet, self.told)
        self.placement, self.metrics = Named(), Metrics()
        self.door = Doorkeeper(
            fleet, self.told, self.budget, self.placement, None, DoorMeter(self.metrics),
            clock=lambda: NOW_S,
        )  # fmt: skip

    def ask(self, name: str, tenant: str = "") -> tuple[RequestRecord, Ask]:
        one = msgspec.structs.replace(record(name), tenant=tenant)
        return one, self.door.ask(one)

    def open(self) -> None:
        self.told.wait_ms["w1"] = 0.0
        self.door.hear_beat()

    async def wait(self, name: str, *, is_admitted: bool = True) -> PrefillPlace | None:
        return await self.door.wait(*self.ask(name), is_admitted=is_admitted)

    @property
    def num_shown(self) -> float:
        return float(self.metrics.waiting_requests.labels(SERVED, 0)._value.get())


async def test_with_room_a_request_is_placed_at_once() -> None:
    """No waiting, no task switch; its tenant and its budget are charged."""
    rig = Rig()
    rig.open()
    one, ask = rig.ask("one", "acme")
    assert isinstance(rig.door.judge(ask), Admit)
    assert "one" in rig.budget.books
    assert rig.door.enter(one, ask) == PrefillPlace(worker="w1")
    assert rig.door.room.queue(SERVED).counter("acme") > 0
    assert rig.door.is_under_way("one")
    assert rig.metrics.tenant_requests.labels("acme")._value.get() == 1


async def test_who_waits_is_let_go_when_there_is_room(until: Until) -> None:
    """Placed in the order of the room, each with its own place; nothing is left behind."""
    rig = Rig()
    one, ask = rig.ask("zero")
    assert rig.door.enter(one, ask) is None
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(rig.wait(f"r{i}")) for i in range(5)]
        await until(lambda: len(rig.door.room) == 5)
        assert rig.num_shown == 5
        assert [one.request_id for one in rig.door.waiting()] == [f"r{i}" for i in range(5)]
        rig.open()
    assert [task.result() for task in waiting] == [PrefillPlace(worker="w1")] * 5
    assert rig.placement.places == [f"r{i}" for i in range(5)]
    assert (len(rig.door.room), rig.num_shown, list(rig.door.waiting())) == (0, 0, [])


@pytest.mark.parametrize(
    "news",
    [
        lambda door: door.hear_end("one", None),
        lambda door: door.hear_claim(claim("one", "w2")),
    ],
    ids=["it ended", "a worker has it by way of another process"],
)
async def test_who_need_not_wait_any_more_is_told(
    until: Until, news: Callable[[Doorkeeper], None]
) -> None:
    """It has no place, for it needs none."""
    rig = Rig()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rig.wait("one"))
        await until(lambda: len(rig.door.room) == 1)
        news(rig.door)
    assert waiting.result() is None
    assert len(rig.door.room) == 0
    assert rig.placement.places == []


async def test_who_is_given_back_leaves_nothing(until: Until) -> None:
    """Its place in the line and its charge go with it."""
    rig = Rig()
    async with task_scope() as tasks:
        _, ask = rig.ask("one")
        rig.door.judge(ask)
        waiting = tasks.create_task(rig.wait("one"))
        await until(lambda: len(rig.door.room) == 1)
        waiting.cancel()
        await until(waiting.done)
    assert len(rig.door.room) == 0
    assert "one" not in rig.budget.books
    rig.open()
    assert rig.placement.places == []


async def test_the_same_request_waits_once(until: Until) -> None:
    """Its second message is done with: the first one's stays in the queue."""
    rig = Rig()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rig.wait("one"))
        await until(lambda: len(rig.door.room) == 1)
        assert await rig.wait("one") is None
        rig.open()
    assert first.result() is not None


async def test_a_placement_that_fails_ends_one_request_only(until: Until) -> None:
    """Whoever waits gets the error, and the next one its turn."""
    rig = Rig()
    rig.placement.error = ZeroDivisionError("a bug")
    async with task_scope() as tasks:
        waiting = tasks.create_task(_outcome(rig.wait("one")))
        await until(lambda: len(rig.door.room) == 1)
        rig.open()
        await until(waiting.done)
        assert isinstance(waiting.result(), ZeroDivisionError)
        rig.placement.error = None
        assert await rig.wait("two") == PrefillPlace(worker="w1")


async def test_the_budget_is_asked_again_when_the_turn_has_come(until: Until) -> None:
    """Who was told to wait is charged when it goes; who may not go any more is told so."""
    rig = Rig()
    rig.budget.verdicts = {
        "late": Refuse(retry_after_s=3.0, reason="no more", shortage="ttft"),
        "soon": Wait(until_s=NOW_S + 1, shortage="kv"),
    }
    async with task_scope() as tasks:
        late = tasks.create_task(_outcome(rig.wait("late", is_admitted=False)))
        soon = tasks.create_task(_outcome(rig.wait("soon", is_admitted=False)))
        await until(lambda: len(rig.door.room) == 2)
        rig.open()
        await until(late.done)
        error = late.result()
        assert isinstance(error, OverBudget)
        assert error.retry_after_s == 3.0
        assert "soon" not in rig.budget.books
        rig.budget.verdicts.clear()
        rig.door.hear_end("somebody", 3)
        await until(soon.done)
    assert "soon" in rig.budget.books


async def test_what_others_place_counts(until: Until) -> None:
    """Another control process fills the worker up: nobody goes from here."""
    rig = Rig()
    rig.open()
    for i in range(64):
        placed = Placed(
            process="control-b", request_id=f"b{i}", served=SERVED, worker="w1", role="prefill"
        )
        rig.door.hear_placed(placed)
    one, ask = rig.ask("one")
    assert rig.door.enter(one, ask) is None
    rig.door.hear_end("b0", 3)
    assert rig.door.enter(one, ask) is not None


async def test_who_overtakes_goes_at_once_and_its_worker_is_told(until: Until) -> None:
    """Beside a tenant whose requests wait; the task says that it is before what lies there."""
    rig = Rig()
    rig.open()
    assert rig.door.enter(*rig.ask("big-0", "big")) == PrefillPlace(worker="w1")
    rig.told.wait_ms["w1"] = 10_000.0
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rig.door.wait(*rig.ask("big-1", "big"), is_admitted=True))
        await until(lambda: len(rig.door.room) == 1)
        one, ask = rig.ask("small", "small")
        place = rig.door.enter(one, ask)
        assert place == PrefillPlace(worker="w1", overtakes=True)
        task = prefill_task(one, place).message
        assert isinstance(task, PrefillTask)
        assert task.overtakes
        rig.open()
    assert waiting.result() == PrefillPlace(worker="w1")


async def test_tenants_have_few_labels() -> None:
    """Names come from outside; the first ones have a label, the others one together."""
    rig = Rig()
    rig.open()
    for i in range(MAX_TENANTS + 5):
        one, ask = rig.ask(f"r{i}", f"tenant-{i}")
        assert rig.door.enter(one, ask) is not None
        rig.door.hear_claim(claim(one.request_id, "w1"))
        rig.door.hear_end(one.request_id, 1)
    counts = rig.metrics.tenant_requests
    assert counts.labels(OTHER)._value.get() == 5
    assert counts.labels("tenant-0")._value.get() == 1
    assert len(next(iter(counts.collect())).samples) <= 2 * (MAX_TENANTS + 1)


async def _outcome(waiting: object) -> object:
    try:
        return await waiting  # type: ignore[misc]
    except Exception as error:
        return error
