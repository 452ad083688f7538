from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.fleet import Fleet
from pipeline.outlook import MAX_AGE_S, MAX_SENT, Outlook
from pipeline.topology import Links
from schemas.control import Beat, Load, Placed
from schemas.profiles import StepCosts
from schemas.subjects import ANY
from tests.pipeline.placing import claimed
from tests.pipeline.rig import SERVED, beat

COSTS = StepCosts(
    prefill_base_ms=10,
    prefill_token_ms=0.1,
    prefill_square_ms=0,
    decode_base_ms=10,
    decode_context_ms=0.001,
    decode_sequence_ms=0.5,
)


def worker(name: str, *, roles: tuple[str, ...] = ("prefill",), costs: StepCosts | None = COSTS,
           state: str = "ready", **load: Any) -> Beat:  # fmt: skip
    told = beat(name, roles=roles, state=state)
    facts = {"num_blocks": 1000, "num_free_blocks": 1000, "num_free_slots": 32, **load}
    return msgspec.structs.replace(told, costs=costs, block_size=16, load=Load(**facts))


def placed(
    name: str, request: str, ms: float = 0.0, role: str = "prefill", tokens: int = 100
) -> Placed:
    return Placed(
        process="control-1",
        request_id=request,
        served=SERVED,
        worker=name,
        role=role,  # type: ignore[arg-type]
        prefill_ms=ms,
        num_tokens=tokens,
    )


def hearing(*beats: Beat, now_s: float = 0.0, links: Links | None = None) -> tuple[Outlook, Fleet]:
    fleet = Fleet(1.5, 0.0)
    outlook = Outlook(fleet, beat_s=0.5, links=links)
    for one in beats:
        tell(outlook, fleet, one, now_s)
    return outlook, fleet


def tell(outlook: Outlook, fleet: Fleet, one: Beat, now_s: float) -> None:
    fleet.hear(one, now_s)
    outlook.hear_beat(one, now_s)


def test_of_many_workers_the_waits_are_those_of_each() -> None:
    """Looked up at once: of silent ones infinite, of those without costs unknown, and of all
    others what they said, less what they have done since, plus what was placed there."""
    names = [f"w{number:02}" for number in range(40)]
    outlook, fleet = hearing(*(worker(name, waiting_ms=100.0) for name in names[:10]))
    for number, name in enumerate(names[10:]):
        costs = None if number % 5 == 0 else COSTS
        tell(outlook, fleet, worker(name, costs=costs, waiting_ms=10.0 * number), 1.3)
    outlook.hear_placed(placed("w11", "r1", ms=500.0), 1.35)
    beats = fleet.workers(SERVED, "prefill")
    waits = outlook.prefill_waits_ms(beats, 1.4)
    assert waits == [outlook.prefill_wait_ms(one, 1.4) for one in beats]
    assert waits[:11] == [math.inf] * 10 + [None]
    assert waits[11] == pytest.approx(450.0)
    assert waits[39] == pytest.approx(190.0)


def test_a_queue_flows_off_while_nobody_says_anything() -> None:
    """What a worker said it had to do, less the time since; never below nothing."""
    w1 = worker("w1", waiting_ms=300.0)
    outlook, _ = hearing(w1)
    assert outlook.prefill_wait_ms(w1, 0.0) == 300
    assert outlook.prefill_wait_ms(w1, 0.1) == pytest.approx(200)
    assert outlook.prefill_wait_ms(w1, 1.0) == 0


def test_what_is_placed_is_waited_for_until_the_worker_tells_of_it() -> None:
    """It is counted from the moment it is placed, and once: when the worker has claimed it, its
    next beat says all there is."""
    w1 = worker("w1", waiting_ms=100.0)
    outlook, fleet = hearing(w1)
    outlook.hear_placed(placed("w1", "request-1", 50.0), 0.2)
    assert outlook.prefill_wait_ms(w1, 0.2) == 50  # the first 100 ms are over
    assert outlook.queue_depth(w1, 0.2) == 1
    outlook.hear_claim(claimed("w1", "request-1"), 0.21)
    told = worker("w1", waiting_ms=30.0, num_waiting=1)
    tell(outlook, fleet, told, 0.22)
    assert outlook.prefill_wait_ms(told, 0.22) == 30
    assert outlook.queue_depth(told, 0.22) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_nobody_claims_is_not_forgotten(role: str) -> None:
    """A full worker leaves tasks in its queue for as long as it takes, and its beats know nothing
    of them: they count until they are claimed, placed elsewhere, or their request ended."""
    outlook, fleet = hearing(*(worker(name, roles=(role,)) for name in ("w1", "w2")))
    for number in range(3):
        outlook.hear_placed(placed("w1", f"r{number}", 5000.0, role), 0.4)

    def num_at(name: str) -> float:
        table = outlook.table(SERVED)
        return float(table.column("since")[table.workers.index(name)])

    for beat_number in range(1, 20):
        tell(outlook, fleet, worker("w1", roles=(role,)), beat_number / 2)
        tell(outlook, fleet, worker("w2", roles=(role,)), beat_number / 2)
    assert num_at("w1") == 3
    outlook.hear_claim(claimed("w1", "r0", role), 9.6)
    outlook.hear_placed(placed("w2", "r1", 5000.0, role), 9.6)
    outlook.hear_end("r2", None, 9.6)
    tell(outlook, fleet, worker("w1", roles=(role,)), 9.7)
    assert (num_at("w1"), num_at("w2")) == (0, 1)
    outlook.hear_placed(placed("w1", "r2", 5000.0, role), 9.8)
    assert num_at("w1") == 0, "it has ended: a router was slow to say where it had placed it"
    outlook.check_invariants()


def test_a_load_that_is_old_counts_nothing_that_was_claimed_since() -> None:
    """A worker's engine answers between two steps: what it takes after that is in no beat yet, and
    what it said has gone on since."""
    outlook, fleet = hearing(worker("a"))
    outlook.hear_placed(placed("a", "r1", ms=200), 0.1)
    outlook.hear_claim(claimed("a", "r1"), 0.3)
    old = worker("a", waiting_ms=400.0, num_free_slots=31, age_ms=300.0)
    tell(outlook, fleet, old, 0.5)
    assert outlook.prefill_wait_ms(old, 0.5) == pytest.approx(400 - 300 + 200)
    assert outlook.queue_depth(old, 0.5) == 1
    assert outlook.table(SERVED).column("slots")[0] == 31, "free slots are told as they are now"
    new = worker("a", waiting_ms=300.0, num_free_slots=31, age_ms=100.0)
    tell(outlook, fleet, new, 1.0)
    assert outlook.prefill_wait_ms(new, 1.0) == pytest.approx(200)
    assert outlook.queue_depth(new, 1.0) == 0


def test_a_claim_from_the_shared_queue_counts_as_well() -> None:
    """Nobody placed it; the worker's own costs say how long it takes."""
    w1 = worker("w1")
    outlook, _ = hearing(w1)
    outlook.hear_claim(claimed("w1", "request-1", tokens=1000), 0.0)
    assert outlook.prefill_wait_ms(w1, 0.0) == pytest.approx(110)


def test_two_routers_that_place_the_same_count_once() -> None:
    """A repeat of a Placed, or the same request placed by another: one request."""
    w1 = worker("w1")
    outlook, _ = hearing(w1)
    for _ in range(2):
        outlook.hear_placed(placed("w1", "request-1", 50.0), 0.0)
    assert outlook.queue_depth(w1, 0.0) == 1
    assert outlook.prefill_wait_ms(w1, 0.0) == 50


def test_a_worker_that_is_silent_counts_as_busy() -> None:
    """Two beats missed: infinite wait, no room, until it is heard again. So is one never heard."""
    w1 = worker("w1", roles=("prefill", "decode"))
    outlook, fleet = hearing(w1)
    assert outlook.prefill_wait_ms(w1, 1.1) == 0
    assert outlook.prefill_wait_ms(w1, 1.3) == outlook.queue_depth(w1, 1.3) == math.inf
    forecast = outlook.decode_at(w1, 1.3)
    assert (forecast.free_tokens, forecast.step_ms) == (0, math.inf)
    tell(outlook, fleet, w1, 1.4)
    assert outlook.prefill_wait_ms(w1, 1.4) == 0
    assert outlook.prefill_wait_ms(worker("w2"), 1.4) == math.inf


def test_without_costs_nothing_is_said_of_times() -> None:
    """Depth is all there is."""
    w1 = worker("w1", costs=None, num_waiting=3)
    outlook, _ = hearing(w1)
    assert outlook.prefill_wait_ms(w1, 0.0) is None
    assert outlook.queue_depth(w1, 0.0) == 3
    assert outlook.decode_at(w1, 0.0).step_ms is None


def test_the_way_to_a_worker_is_taken_until_what_was_sent_has_come() -> None:
    """Whoever placed it: one sequence's blocks come after the other's, beats tell nothing of it,
    and it ends by itself."""
    outlook, fleet = hearing(worker("w1", roles=("decode",)))
    table = outlook.table(SERVED)

    def link_ms(now_s: float) -> float:
        return float(table.take(table.rows_of("decode")).link_ms(now_s)[0])

    assert link_ms(0.0) == 0
    for request, there_ms in (("r1", 700.0), ("r2", 300.0)):
        sent = msgspec.structs.replace(placed("w1", request, role="decode"), there_ms=there_ms)
        outlook.hear_placed(sent, 0.0)
    assert link_ms(0.0) == pytest.approx(700)
    tell(outlook, fleet, worker("w1", roles=("decode",), num_running=2), 0.5)
    assert link_ms(0.5) == pytest.approx(200)
    assert link_ms(1.0) == 0


@pytest.mark.parametrize("state", ["gone", "draining"])
def test_who_leaves_is_no_candidate(state: str) -> None:
    """Nor one that the fleet has given up: a frozen worker beats once more when it wakes."""
    w1 = worker("w1")
    outlook, fleet = hearing(w1)
    tell(outlook, fleet, worker("w1", state=state), 0.1)
    assert outlook.table(SERVED).num_rows == 0
    assert outlook.prefill_wait_ms(w1, 0.1) == math.inf
    fleet.judge(5.0)
    outlook.hear_beat(w1, 5.0)
    assert outlook.table(SERVED).num_rows == 0


# Decode -----------------------------------------------------------------------------------------


def test_who_will_have_been_prefilled_joins_and_is_shared_out() -> None:
    """Six sequences wait 600 ms at the prefill worker: in half of that three of them are there,
    for three decode workers."""
    decoders = [worker(f"d{n}", roles=("decode",)) for n in range(3)]
    busy = worker("p1", waiting_ms=600.0, num_waiting=6, waiting_tokens=6000)
    outlook, _ = hearing(busy, *decoders)
    assert outlook.decode_at(decoders[0], 0.0).num_sequences == 0
    half = outlook.decode_at(decoders[0], 0.3)
    assert (half.num_sequences, half.context_tokens) == (1, 1000)
    assert outlook.decode_at(decoders[0], 9.0).num_sequences == 2
    assert half.free_tokens == 16000 - 1000
    assert half.step_ms == pytest.approx(10 + 1 + 0.5)


def test_who_will_have_ended_leaves() -> None:
    """Ten sequences, answers of 100 tokens, steps of 15 ms: after 750 ms half of them are gone."""
    d1 = worker("d1", roles=("decode",), num_running=10, context_tokens=0)
    outlook, _ = hearing(d1)
    outlook.hear_claim(claimed("elsewhere", "request-0"), 0.0)
    outlook.hear_end("request-0", 100, 0.0)
    assert outlook.decode_at(d1, 0.0).num_sequences == 10
    assert outlook.decode_at(d1, 0.75).num_sequences == 5
    assert outlook.decode_at(d1, 1.1).num_sequences == 3


def test_a_decode_that_was_placed_since_counts() -> None:
    """With its tokens."""
    d1 = worker("d1", roles=("decode",), num_running=1, context_tokens=50)
    outlook, _ = hearing(d1)
    outlook.hear_placed(placed("d1", "request-1", role="decode", tokens=100), 0.0)
    forecast = outlook.decode_at(d1, 0.0)
    assert (forecast.num_sequences, forecast.context_tokens) == (2, 150)


def test_a_decode_in_the_shared_queue_is_everybodys() -> None:
    """Each decode worker is told its part of it, until one claims it; that one has it then."""
    decoders = [worker(name, roles=("decode",)) for name in ("d1", "d2")]
    outlook, fleet = hearing(*decoders)
    for number in range(4):
        outlook.hear_placed(placed(ANY, f"r{number}", role="decode", tokens=1000), 0.0)
    tell(outlook, fleet, decoders[0], 2.0)
    tell(outlook, fleet, decoders[1], 2.0)
    forecasts = [outlook.decode_at(one, 2.0) for one in decoders]
    assert [one.num_sequences for one in forecasts] == [2, 2]
    assert [one.free_tokens for one in forecasts] == [14_000, 14_000]
    outlook.hear_claim(claimed("d1", "r0", "decode", tokens=1000), 2.1)
    outlook.hear_end("r1", None, 2.1)
    assert [outlook.decode_at(one, 2.1).context_tokens for one in decoders] == [2000, 1000]


def test_a_claim_that_was_missed_is_read_again() -> None:
    """Then the worker's beats tell of it; of one that was heard nothing changes. And what nobody
    ever tells of is dropped when no request is that old."""
    d1 = worker("d1", roles=("decode",))
    outlook, fleet = hearing(d1)
    for name, request in (("d1", "r1"), (ANY, "r2"), (ANY, "r3")):
        outlook.hear_placed(placed(name, request, role="decode", tokens=1000), 0.0)
    outlook.hear_stored(claimed("d1", "r1", "decode"), 30.0)
    outlook.hear_stored(claimed("d1", "r2", "decode"), 30.0)
    outlook.hear_stored(claimed("d1", "r4", "decode"), 30.0)
    tell(outlook, fleet, d1, 30.5)
    assert outlook.decode_at(d1, 30.5).context_tokens == 1000
    tell(outlook, fleet, d1, MAX_AGE_S + 1)
    assert outlook.decode_at(d1, MAX_AGE_S + 1).context_tokens == 0
    outlook.check_invariants()


def test_whose_decode_worker_goes_is_everybodys() -> None:
    """It lies on a dead worker's queue, and somebody will get it: what was claimed there is
    computed again, and counts as a prompt."""
    d1, d2 = (worker(name, roles=("decode",)) for name in ("d1", "d2"))
    outlook, fleet = hearing(d1, d2)
    outlook.hear_placed(placed("d1", "lies", role="decode", tokens=1000), 0.0)
    outlook.hear_placed(placed("d1", "runs", role="decode", tokens=1000), 0.0)
    outlook.hear_claim(claimed("d1", "runs", "decode"), 0.0)
    tell(outlook, fleet, worker("d1", roles=("decode",), state="gone"), 0.1)
    assert outlook.decode_at(d2, 0.1).context_tokens == 1000
    outlook.hear_placed(placed("d2", "lies", role="decode", tokens=1000), 0.2)
    assert outlook.decode_at(d2, 0.2).context_tokens == 1000
    outlook.check_invariants()


def test_who_finds_no_room_is_counted() -> None:
    """Memory that is missing is below nothing; steps are made by those alone who find room."""
    full = worker("d1", roles=("decode",), num_running=8, context_tokens=16_000, num_free_blocks=0)
    outlook, _ = hearing(full)
    for number in range(8):
        outlook.hear_placed(placed("d1", f"r{number}", role="decode", tokens=2000), 0.0)
    forecast = outlook.decode_at(full, 0.0)
    assert forecast.free_tokens == -16_000
    assert (forecast.num_sequences, forecast.context_tokens) == (8, 16_000)


def test_a_prompt_is_coming_until_it_is_handed_over() -> None:
    """With all of its tokens, also while half of it is computed and no beat tells that it waits;
    a decode that was placed is there, and comes no more."""
    d1, p1 = worker("d1", roles=("decode",)), worker("p1")
    outlook, fleet = hearing(d1, p1)
    outlook.hear_placed(placed("p1", "r1", 400.0, tokens=4000), 0.0)
    outlook.hear_claim(claimed("p1", "r1", tokens=4000), 0.0)
    half = worker("p1", waiting_ms=200.0, waiting_tokens=2000, num_running=1)
    tell(outlook, fleet, half, 0.2)
    assert outlook.decode_at(d1, 0.3).context_tokens == 0, "none is half over"
    assert outlook.decode_at(d1, 0.4).context_tokens == 4000
    outlook.hear_placed(placed("d1", "r1", role="decode", tokens=4000), 0.4)
    assert outlook.decode_at(d1, 0.4).context_tokens == 4000
    outlook.hear_end("r1", 10, 0.5)
    assert outlook.decode_at(d1, 0.5).context_tokens == 0
    outlook.check_invariants()


def test_kv_waits_for_the_way_in() -> None:
    """One sequence's blocks come after the other's, so whoever is sent last waits for them all;
    a worker whose own way is free will be sent what others can't take."""
    d1, d2 = (
        msgspec.structs.replace(
            worker(name, roles=("decode",)), kv_token_bytes=1_000_000, host=name
        )
        for name in ("d1", "d2")
    )
    outlook, _ = hearing(d1, d2, worker("p1"), links=Links(other=1.0))
    sent = placed("d1", "r1", role="decode", tokens=1000)
    outlook.hear_placed(msgspec.structs.replace(sent, there_ms=1000.0), 0.0)
    first, second = (outlook.decode_at(one, 0.0) for one in (d1, d2))
    assert first.way_token_ms == second.way_token_ms == pytest.approx(1.0)
    assert (first.way_ms, second.way_ms) == (pytest.approx(1000.0), pytest.approx(500.0))
    later = outlook.decode_at(d1, 0.4)
    assert later.way_ms == pytest.approx(600.0)


def test_expected_tokens_are_the_mean_of_what_was_seen() -> None:
    """And no more than may come. What was cut off says nothing."""
    outlook, _ = hearing()
    assert outlook.expected_tokens(SERVED, 50) == 50
    for number, tokens in enumerate((10, 30, None)):
        outlook.hear_claim(claimed("w1", f"request-{number}"), 0.0)
        outlook.hear_end(f"request-{number}", tokens, 0.0)
    assert outlook.expected_tokens(SERVED, 50) == 20
    assert outlook.expected_tokens(SERVED, 5) == 5
    assert outlook.expected_tokens("other@r1", 5) == 5


def test_what_is_remembered_is_bounded() -> None:
    """However much is said to have been placed with a worker that does not beat."""
    w1 = worker("w1")
    outlook, _ = hearing(w1)
    for number in range(MAX_SENT + 10):
        outlook.hear_placed(placed("w1", f"request-{number}"), 0.0)
    assert outlook.queue_depth(w1, 0.0) == MAX_SENT
    fleet = Fleet(1.5, 0.0)
    outlook = Outlook(fleet)
    for number in range(100):
        tell(outlook, fleet, worker(f"w{number}"), float(number))
    assert len(outlook._known) <= 62


@settings(deadline=None)
@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 3), st.floats(0, 3))
def test_placing_never_lowers_a_wait(waiting: float, ms: float, at: float, later: float) -> None:
    """Neither now nor at any later moment."""
    w1 = worker("w1", waiting_ms=waiting)
    without, _ = hearing(w1)
    with_it, _ = hearing(w1)
    with_it.hear_placed(placed("w1", "request-1", ms), at)
    now_s = at + later
    one, other = without.prefill_wait_ms(w1, now_s), with_it.prefill_wait_ms(w1, now_s)
    assert one is not None
    assert other is not None
    assert other >= one - 1e-6


class Books(RuleBasedStateMachine):
    """Any order of beats, placements, claims, ends and deaths: figures stay in range, rows and
    workers belong together, and a beat that follows all claims makes the account the worker's."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.fleet = Fleet(1.5, 0.0)
        self.outlook = Outlook(self.fleet)
        self.beats: dict[str, Beat] = {}
        self.number = 0

    @rule(name=st.sampled_from("abcd"), ms=st.floats(0, 1e4), running=st.integers(0, 64),
          role=st.sampled_from(["prefill", "decode"]))  # fmt: skip
    def beats_once(self, name: str, ms: float, running: int, role: str) -> None:
        self.beats[name] = worker(name, roles=(role,), waiting_ms=ms, num_running=running)
        tell(self.outlook, self.fleet, self.beats[name], self.now_s)

    @rule(name=st.sampled_from([*"abcde", ANY]), ms=st.floats(0, 1e4),
          role=st.sampled_from(["prefill", "decode"]))  # fmt: skip
    def places(self, name: str, ms: float, role: str) -> None:
        self.number += 1
        self.outlook.hear_placed(placed(name, f"request-{self.number}", ms, role), self.now_s)

    @rule(name=st.sampled_from("abcde"), back=st.integers(0, 3))
    def claims(self, name: str, back: int) -> None:
        self.outlook.hear_claim(claimed(name, f"request-{self.number - back}"), self.now_s)

    @rule(back=st.integers(0, 3), tokens=st.integers(0, 1000))
    def ends(self, back: int, tokens: int) -> None:
        self.outlook.hear_end(f"request-{self.number - back}", tokens, self.now_s)

    @rule(s=st.floats(0, 2))
    def time_passes(self, s: float) -> None:
        self.now_s += s
        self.fleet.judge(self.now_s)

    @precondition(lambda self: bool(self.beats))
    @rule()
    def goes(self) -> None:
        _name, last = self.beats.popitem()
        tell(self.outlook, self.fleet, msgspec.structs.replace(last, state="gone"), self.now_s)

    @invariant()
    def figures_are_in_range(self) -> None:
        self.outlook.check_invariants()
        for one in self.beats.values():
            wait = self.outlook.prefill_wait_ms(one, self.now_s)
            assert wait is not None
            assert wait >= 0
            assert self.outlook.queue_depth(one, self.now_s) >= 0
            for later in (0.0, 0.7, 50.0):
                forecast = self.outlook.decode_at(one, self.now_s + later)
                assert forecast.num_sequences >= 0 <= forecast.context_tokens
                assert forecast.free_tokens <= 16000
                assert forecast.step_ms is not None
                assert forecast.step_ms >= 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
