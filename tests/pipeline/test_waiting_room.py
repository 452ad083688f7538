"""Who waits for a worker, and when the next one is let go."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.company import COMPANY_S
from pipeline.fair_queue import Ticket
from pipeline.fleet import Fleet
from pipeline.forecast import DecodeForecast
from pipeline.openings import MAX_AHEAD, Openings
from pipeline.verdict import Admit, Refuse, Wait
from pipeline.waiting_room import WaitingRoom
from schemas.control import Beat
from schemas.profiles import StepCosts
from schemas.subjects import ANY
from tests.pipeline.rig import SERVED, beat

COSTS = StepCosts(
    prefill_base_ms=20.0,
    prefill_token_ms=1.0,
    prefill_square_ms=0.0,
    decode_base_ms=10.0,
    decode_context_ms=0.0,
    decode_sequence_ms=0.0,
)
AHEAD_MS = 250.0  # what the numbers below are made for
NOW_S = 50.0


@dataclass(slots=True)
class Told:
    """A forecast that says what it is told; without, that nobody waits."""

    wait_ms: dict[str, float | None] = field(default_factory=dict)
    depth: dict[str, float] = field(default_factory=dict)
    at_s: float = NOW_S

    def costs(self, beat: Beat) -> StepCosts | None:
        return beat.costs

    def prefill_wait_ms(self, beat: Beat, now_s: float) -> float | None:
        wait_ms = self.wait_ms.get(beat.worker, 0.0)
        return None if wait_ms is None else max(0.0, wait_ms - 1000 * (now_s - self.at_s))

    def prefill_waits_ms(self, beats: Iterable[Beat], now_s: float) -> list[float | None]:
        return [self.prefill_wait_ms(beat, now_s) for beat in beats]

    def queue_depth(self, beat: Beat, now_s: float) -> float:
        return self.depth.get(beat.worker, 0.0)

    def decode_at(self, beat: Beat, at_s: float) -> DecodeForecast:
        raise NotImplementedError

    def expected_tokens(self, served: str, max_tokens: int) -> float:
        return float(max_tokens)


def fleet_of(*workers: str, num_free_slots: int = 64, served: str = SERVED) -> Fleet:
    fleet = Fleet(1.5, NOW_S)
    for worker in workers:
        one = beat(worker, num_free_slots=num_free_slots)
        fleet.hear(msgspec.structs.replace(one, costs=COSTS, served=served), NOW_S)
    return fleet


def ticket(request_id: str, tenant: str = "a", *, num: int = 100, served: str = SERVED) -> Ticket:
    return Ticket(
        request_id=request_id,
        served=served,
        num_uncached=num,
        expected_tokens=10.0,
        arrived_s=NOW_S,
        tenant=tenant,
    )


def arrive(room: WaitingRoom, *tickets: Ticket) -> list[bool]:
    """Who goes at once; the others wait."""
    went = []
    for one in tickets:
        went.append(room.enter(one, NOW_S))
        if not went[-1]:
            room.push(one, NOW_S)
    return went


def let_go(room: WaitingRoom, now_s: float = NOW_S) -> list[str]:
    found = []
    while (one := room.next_ready(now_s)) is not None:
        found.append(one.request_id)
        room.check_invariants()
    return found


# When a pool is open -------------------------------------------------------------------------


def test_without_a_worker_nobody_waits_here() -> None:
    """The durable queue waits for workers: any number go there, as fast as they come."""
    room = WaitingRoom(Fleet(1.5, NOW_S), Told())
    assert all(room.enter(ticket(str(i)), NOW_S) for i in range(5000))
    assert len(room) == 0


def test_a_pool_is_open_while_some_worker_waits_little() -> None:
    """One worker with less than the horizon in front of it is enough; at the edge it counts."""
    told = Told({"w1": AHEAD_MS + 100, "w2": AHEAD_MS})
    openings = Openings(fleet_of("w1", "w2"), told, ahead_ms=AHEAD_MS)
    assert openings.is_open(SERVED, NOW_S)
    told.wait_ms["w2"] = AHEAD_MS + 50
    assert not openings.is_open(SERVED, NOW_S)
    assert openings.opens_s(SERVED, NOW_S) == pytest.approx(NOW_S + 0.05)
    assert openings.is_open(SERVED, NOW_S + 0.051)


def test_stale_workers_have_no_room() -> None:
    """All are silent: nobody is sent there, and time alone does not change it."""
    openings = Openings(fleet_of("w1"), Told({"w1": math.inf}, {"w1": math.inf}), ahead_ms=AHEAD_MS)
    assert openings.opens_s(SERVED, NOW_S) == math.inf


def test_a_worker_without_costs_is_judged_by_how_many_wait() -> None:
    """Nothing else is known of it."""
    told = Told({"w1": None}, {"w1": 15.0})
    openings = Openings(fleet_of("w1"), told, ahead_ms=AHEAD_MS)
    assert openings.is_open(SERVED, NOW_S)
    told.depth["w1"] = 16.0
    assert openings.opens_s(SERVED, NOW_S) == math.inf


def test_prompts_that_come_together_share_steps() -> None:
    """Ten short prompts since the beat are predicted as ten prefills, and take little more than
    one: of each but one, the base of a step is not waited for."""
    openings = Openings(
        fleet_of("w1"), Told({"w1": 10 * 22.0 + 200}, {"w1": 10.0}), ahead_ms=AHEAD_MS
    )
    assert openings.is_open(SERVED, NOW_S)
    openings = Openings(
        fleet_of("w1"), Told({"w1": 10 * 22.0 + 200}, {"w1": 1.0}), ahead_ms=AHEAD_MS
    )
    assert not openings.is_open(SERVED, NOW_S)


def test_tasks_for_anybody_count_until_they_are_claimed() -> None:
    """No beat and no forecast tells of them."""
    openings = Openings(fleet_of("w1", "w2"), Told(), ahead_ms=AHEAD_MS)
    for i in range(6):
        openings.sent(f"r{i}", SERVED, ANY, 80)  # 100 ms each
    assert not openings.is_open(SERVED, NOW_S)
    openings.claimed("r0", "w1")
    assert openings.is_open(SERVED, NOW_S)
    openings.check_invariants()


def test_a_full_worker_gets_a_few_ahead_of_its_need() -> None:
    """So that what ends is replaced at once, and the others keep their place in the order."""
    openings = Openings(fleet_of("w1", num_free_slots=2), Told(), ahead_ms=AHEAD_MS)
    for name in ("x", "y"):
        openings.claimed(name, "w1")
    num_ahead = 0
    while openings.is_open(SERVED, NOW_S):
        openings.sent(f"r{num_ahead}", SERVED, "w1")
        num_ahead += 1
    assert num_ahead == 4
    openings.claimed("r0", "w1")
    assert openings.is_open(SERVED, NOW_S), "one was taken, so another may go"
    openings.sent("next", SERVED, "w1")
    assert not openings.is_open(SERVED, NOW_S)
    openings.ended("r1")
    assert openings.is_open(SERVED, NOW_S), "so it is when one ends before it was taken"


def test_news_may_come_in_any_order() -> None:
    """A claim that is faster than word of where the request went; ends of nobody; a move from a
    prefill to a decode worker."""
    openings = Openings(fleet_of("w1", "w2"), Told(), ahead_ms=AHEAD_MS)
    openings.claimed("r", "w1")
    openings.sent("r", SERVED, "w1")
    openings.claimed("r", "w2")
    openings.check_invariants()
    openings.ended("r")
    openings.ended("r")
    openings.check_invariants()
    assert not openings._num_held
    assert not openings._num_tasks


# Who goes ------------------------------------------------------------------------------------


def test_who_finds_room_and_nobody_waiting_goes_at_once() -> None:
    """Whoever comes later does not overtake those that wait."""
    told = Told({"w1": 1000.0})
    room = WaitingRoom(fleet_of("w1"), told, ahead_ms=AHEAD_MS)
    assert arrive(room, ticket("first")) == [False]
    told.wait_ms["w1"] = 0.0
    assert arrive(room, ticket("second")) == [False]
    assert let_go(room) == ["first", "second"]
    assert arrive(room, ticket("third")) == [True]
    assert room.num_waiting(SERVED) == len(room) == 0


def test_no_more_go_than_there_is_room_for() -> None:
    """Those let go in the same moment count before any worker tells of them."""
    told = Told({"w1": AHEAD_MS + 1})
    room = WaitingRoom(fleet_of("w1"), told, ahead_ms=AHEAD_MS)
    assert not any(arrive(room, *(ticket(f"r{i}", num=80) for i in range(20))))
    told.wait_ms["w1"] = 0.0
    assert let_go(room) == ["r0", "r1", "r2"]  # 100 ms each, and up to the horizon is ahead
    assert room.num_waiting(SERVED) == 17


def test_tenants_take_turns_and_ends_are_settled() -> None:
    """The room is the fair queue with a door."""
    told = Told({"w1": 1000.0})
    room = WaitingRoom(fleet_of("w1"), told, ahead_ms=AHEAD_MS, mixed_ahead_ms=AHEAD_MS)
    for i in range(4):
        room.push(ticket(f"big-{i}", "big"), NOW_S)
    room.push(ticket("small-0", "small"), NOW_S)
    told.wait_ms["w1"] = 0.0
    assert let_go(room)[:2] == ["big-0", "small-0"]
    before = room.queue(SERVED).counter("big")
    room.ended("big-0", 40)
    assert room.queue(SERVED).counter("big") == before + 2 * (40 - 10)


def test_less_lies_ahead_of_workers_while_several_tenants_come() -> None:
    """What lies at a worker is before whoever comes next: of one tenant that does not matter."""
    told = Told({"w1": 60.0})
    room = WaitingRoom(fleet_of("w1"), told, ahead_ms=AHEAD_MS, mixed_ahead_ms=20.0)
    assert arrive(room, ticket("big-0", "big"), ticket("big-1", "big")) == [True, True]
    room.claimed("big-0", "w1")
    room.claimed("big-1", "w1")
    assert arrive(room, ticket("small-0", "small")) == [False]
    assert room.next_look_s(NOW_S) == pytest.approx(NOW_S + 0.04), "when 20 ms are left"
    assert let_go(room, NOW_S + 0.041) == ["small-0"]
    room.claimed("small-0", "w1")
    room.push(ticket("big-2", "big"), NOW_S)
    told.at_s = later_s = NOW_S + COMPANY_S + 1
    told.wait_ms["w1"] = 60.0
    assert let_go(room, later_s) == ["big-2"], "the other one has not come for long"


def test_who_overtakes_needs_a_place_alone() -> None:
    """A tenant that uses less than its share goes at once, before those who wait, however much lies
    ahead of the workers: it is before that, too. Its next ones wait when it had its share."""
    told = Told({"w1": 5000.0})
    room = WaitingRoom(fleet_of("w1"), told, ahead_ms=AHEAD_MS)
    small = ticket("small-0", "small", num=10)
    room.queue(SERVED).charge(ticket("big", "big"))
    assert not room.overtakes(small), "nobody waits"
    assert arrive(room, *(ticket(f"big-{i}", "big") for i in range(3))) == [False] * 3
    assert room.overtakes(small)
    assert not room.overtakes(ticket("small-0", "small", served="other@r1"))
    assert arrive(room, small, ticket("big-3", "big")) == [True, False]
    long = ticket("small-1", "small", num=100_000)
    assert arrive(room, long, ticket("small-2", "small")) == [True, False]
    told.wait_ms["w1"] = math.inf
    assert arrive(room, ticket("third-0", "third")) == [False], "its worker is not heard"
    room.check_invariants()


def test_who_overtakes_waits_for_a_place() -> None:
    """No worker gets more tasks than it has places for, by whatever right they come."""
    fleet = fleet_of("w1", num_free_slots=32)
    room = WaitingRoom(fleet, Told({"w1": 5000.0}), ahead_ms=AHEAD_MS)
    room.queue(SERVED).charge(ticket("big", "big"))
    room.push(ticket("big-0", "big"), NOW_S)
    went = arrive(room, *(ticket(f"t{i}", f"tenant-{i}") for i in range(40)))
    assert went == [True] * 32 + [False] * 8


def test_too_many_are_on_their_way_to_a_large_worker() -> None:
    """However many places it has: what it has not claimed is not there yet."""
    room = WaitingRoom(fleet_of("w1", num_free_slots=1000), Told({"w1": 0.0}), ahead_ms=AHEAD_MS)
    went = arrive(room, *(ticket(f"t{i}", num=0) for i in range(MAX_AHEAD + 1)))
    assert went == [True] * MAX_AHEAD + [False]


def test_another_pools_tenants_are_no_company() -> None:
    """They wait for other workers."""
    fleet = fleet_of("w1")
    fleet.hear(msgspec.structs.replace(beat("w2"), costs=COSTS, served="other@r1"), NOW_S)
    room = WaitingRoom(fleet, Told({"w1": 60.0}), ahead_ms=AHEAD_MS, mixed_ahead_ms=20.0)
    assert arrive(room, ticket("a", "a"), ticket("b", "b", served="other@r1")) == [True, True]
    room.claimed("a", "w1")
    assert arrive(room, ticket("c", "a")) == [True]


def test_pools_do_not_wait_for_each_other() -> None:
    """A crowd in front of one model keeps nobody from another."""
    fleet = fleet_of("w1")
    fleet.hear(msgspec.structs.replace(beat("w2"), costs=COSTS, served="other@r1"), NOW_S)
    told = Told({"w1": 1000.0, "w2": 1000.0})
    room = WaitingRoom(fleet, told, ahead_ms=AHEAD_MS)
    for i in range(10):
        room.push(ticket(f"r{i}"), NOW_S)
    room.push(ticket("else", served="other@r1"), NOW_S)
    assert let_go(room) == []
    assert room.next_look_s(NOW_S) == pytest.approx(NOW_S + 0.75)
    told.wait_ms["w2"] = 0.0
    assert let_go(room) == ["else"]


def test_who_leaves_is_not_let_go() -> None:
    """Cancelled, expired, or claimed by way of another control process."""
    told = Told({"w1": 1000.0})
    room = WaitingRoom(fleet_of("w1"), told, ahead_ms=AHEAD_MS)
    for name in ("gone", "ended", "elsewhere", "stays"):
        room.push(ticket(name), NOW_S)
    assert room.leave("gone") == ticket("gone")
    assert room.leave("gone") is None
    assert room.ended("ended", None) == ticket("ended")
    assert room.claimed("elsewhere", "w1") == ticket("elsewhere")
    told.wait_ms["w1"] = 0.0
    assert let_go(room) == ["stays"]
    assert room.claimed("stays", "w1") is None
    assert room.ended("stays", 3) is None
    room.check_invariants()


# The budget ----------------------------------------------------------------------------------


def test_the_first_waits_for_its_budget_and_the_others_for_the_first() -> None:
    """Else those who need less would use up what it waits for."""
    verdicts: dict[str, Admit | Wait | Refuse] = {
        "large": Wait(until_s=NOW_S + 2, shortage="kv"),
    }
    told = Told({"w1": 1000.0})
    room = WaitingRoom(
        fleet_of("w1"),
        told,
        gate=lambda one, _: verdicts.get(one.request_id, Admit()),
        ahead_ms=AHEAD_MS,
    )
    for name in ("large", "small"):
        room.push(ticket(name), NOW_S)
    told.wait_ms["w1"] = 0.0
    assert let_go(room) == []
    assert room.next_look_s(NOW_S) == NOW_S + 2
    verdicts.clear()
    assert let_go(room) == [], "it is not asked again before its time"
    room.ended("somebody", None)
    assert let_go(room) == ["large", "small"], "unless something has changed"


def test_the_budget_may_refuse_in_the_end() -> None:
    """Who waited for longer than its policy has it is handed out as refused, and the next goes."""
    refusal = Refuse(retry_after_s=3.0, reason="busy", shortage="ttft")
    told = Told({"w1": 1000.0})
    room = WaitingRoom(
        fleet_of("w1"), told,
        gate=lambda one, _: refusal if one.request_id == "late" else Admit(),
    )  # fmt: skip
    for name in ("late", "next"):
        room.push(ticket(name), NOW_S)
    told.wait_ms["w1"] = 0.0
    assert let_go(room) == ["next"]
    assert room.take_refused() == [(ticket("late"), refusal)]
    assert room.take_refused() == []
    assert room.queue(SERVED).counter("a") == 100 + 2 * 10, "only one was charged"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["push", "next", "leave", "claim", "end", "wait", "sent"]),
            st.integers(0, 15),
        ),
        max_size=60,
    )
)
def test_whatever_is_heard_every_request_goes_or_leaves_once(steps: list[tuple[str, int]]) -> None:
    """News of requests in any order, known ones and unknown ones: the books stay in order."""
    told = Told()
    room = WaitingRoom(fleet_of("w1", "w2"), told, ahead_ms=AHEAD_MS)
    inside: set[str] = set()
    for kind, number in steps:
        name = f"r{number}"
        if kind == "push" and name not in inside:
            room.push(ticket(name, "ab"[number % 2]), NOW_S)
            inside.add(name)
        elif kind == "next":
            found = room.next_ready(NOW_S)
            if found is not None:
                inside.remove(found.request_id)
        elif kind == "leave":
            assert (room.leave(name) is not None) == (name in inside)
            inside.discard(name)
        elif kind == "claim":
            assert (room.claimed(name, "w1") is not None) == (name in inside)
            inside.discard(name)
        elif kind == "end":
            assert (room.ended(name, number) is not None) == (name in inside)
            inside.discard(name)
        elif kind == "sent":
            room.openings.sent(name, SERVED, "w2", 10)
        elif kind == "wait":
            told.wait_ms["w1"] = told.wait_ms["w2"] = 100.0 * number
        assert len(room) == len(inside)
        room.check_invariants()
