"""Placement where costs are known: by predicted times, and near."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.metrics import Metrics
from pipeline.fleet import Fleet
from pipeline.placement import Decision, Placement
from pipeline.prefix_hash import prefix_hashes, request_salt
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from pipeline.route_policies import POLICIES
from pipeline.route_settings import RouteSettings
from pipeline.scoring import Weights
from pipeline.suffix import SuffixRule
from pipeline.topology import Links
from schemas.codec import pack_ids
from schemas.control import Beat, Load, Placed
from schemas.errors import ConfigError
from schemas.profiles import StepCosts
from schemas.requests import RequestRecord
from schemas.subjects import ANY
from tests.pipeline.placing import NOW_S, claimed, fleet_of, outlook_of, placing
from tests.pipeline.rig import SERVED, beat, kv_ready, record

COSTS = StepCosts(
    prefill_base_ms=5,
    prefill_token_ms=0.1,
    prefill_square_ms=1e-6,
    decode_base_ms=10,
    decode_context_ms=1e-4,
    decode_sequence_ms=0.1,
)
PROMPT = tuple(range(1024))
_ids = count()


def worker(
    name: str,
    *roles: str,
    factor: float = 1.0,
    host: str = "",
    rack: str = "",
    zone: str = "",
    kv_token_bytes: int = 100_000,
    **load: Any,
) -> Beat:
    """A worker of its own host whose prefills take ``factor`` times as long."""
    told = beat(name, roles=roles or ("prefill",))
    costs = msgspec.structs.replace(
        COSTS, prefill_token_ms=0.1 * factor, prefill_base_ms=5 * factor
    )
    facts = {"num_blocks": 10_000, "num_free_blocks": 10_000, "num_free_slots": 10_000, **load}
    return msgspec.structs.replace(
        told,
        costs=costs,
        block_size=16,
        kv_token_bytes=kv_token_bytes,
        host=host or name,
        rack=rack,
        zone=zone,
        load=Load(**facts),
    )


def long(num: int = len(PROMPT), offset: int = 0) -> RequestRecord:
    ids = pack_ids(tuple(range(offset, offset + num)))
    like = msgspec.structs.replace(record("r"), prompt_ids=ids)
    return msgspec.structs.replace(like, request_id=f"r{next(_ids):08d}")


def route(
    beats: list[Beat], held: dict[str, int] | None = None, policy: str = "score", **more: Any
) -> Placement:
    """A placement among ``beats``, of whom some hold blocks of ``PROMPT``."""
    fleet = fleet_of(*beats)
    index = RadixIndex(100_000)
    hashes = prefix_hashes(PROMPT, 16, request_salt(long(), "f00d"))
    for name, num_blocks in (held or {}).items():
        index.stored(name, "host", hashes[:num_blocks])
    return placing(fleet, Prefixes(index, fleet, Metrics()), policy, **more)


def settings_of(**more: Any) -> RouteSettings:
    return RouteSettings(**{"weights": Weights(temperature=0.0), **more})


# By predicted finish ----------------------------------------------------------------------------


def test_unequal_workers_compare_by_when_they_would_be_done() -> None:
    """The slow one is idle, the fast one has a queue: the prompt's own time decides."""
    slow = worker("slow", factor=4.0)  # 430 ms for 1,024 tokens
    assert route([slow, worker("fast", waiting_ms=200.0)]).place_prefill(long()).worker == "fast"
    assert route([slow, worker("fast", waiting_ms=400.0)]).place_prefill(long()).worker == "slow"


def test_pools_of_unequal_speed_share_work_by_speed() -> None:
    """Four times as fast, four times as much, within a fifth."""
    placement = route([worker("slow", factor=4.0), worker("fast")])
    placed = [placement.place_prefill(long(offset=n)).worker for n in range(100)]
    assert 70 <= placed.count("fast") <= 90


def test_a_prediction_comes_with_a_place() -> None:
    """What it will wait for, and what it will take."""
    busy = [worker("a", waiting_ms=500.0), worker("b", waiting_ms=500.0)]
    place = route(busy, {"a": 32}).place_prefill(long())
    assert (place.worker, place.reason, place.num_cached) == ("a", "prefix", 512)
    assert place.wait_ms == 500
    assert place.prefill_ms == pytest.approx(5 + 51.2 + 1e-6 * (1024**2 - 512**2))


def test_a_hot_prefix_is_everybodys() -> None:
    """All requests share the prompt, one worker alone holds it, and nobody ever waits: the
    busiest gets no more than 1.5 times the mean."""
    beats = [worker(f"w{n}") for n in range(8)]
    fleet = fleet_of(*beats)
    index = RadixIndex(100_000)
    hashes = prefix_hashes(PROMPT, 16, request_salt(long(), "f00d"))
    index.stored("w0", "device", hashes)
    outlook = outlook_of(fleet)
    clock = [NOW_S]
    placement = placing(fleet, Prefixes(index, fleet, Metrics()), outlook=outlook)
    placement._clock = lambda: clock[0]  # type: ignore[attr-defined]
    placed = []
    for _ in range(1600):
        one = long()
        placed.append(placement.place_prefill(one).worker)
        index.stored(placed[-1], "device", hashes)
        outlook.hear_claim(claimed(placed[-1], one.request_id), clock[0])
        clock[0] += 0.01
        for told in beats:
            outlook.hear_beat(told, clock[0])
    counts = [placed[800:].count(f"w{n}") for n in range(8)]
    assert max(counts) <= 1.5 * 100


@given(st.integers(2, 8), st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_a_newcomer_gets_its_share_and_no_more(num: int, seed: int) -> None:
    """Of requests that nobody knows, among workers that are equally busy, at most a tenth more
    than its part."""
    held = {f"w{n}": 64 for n in range(num - 1)}
    beats = [worker(f"w{n}") for n in range(num)]
    placement = route(beats, held, seed=seed, temperature=0.02)
    placed = [placement.place_prefill(long(64, 5000 + n)).worker for n in range(20 * num)]
    assert placed.count(f"w{num - 1}") <= 20 * 1.1 + 1


# Near -------------------------------------------------------------------------------------------


def test_a_decode_stays_near_its_blocks() -> None:
    """Same host before same rack before same zone before the rest, among equally busy workers."""
    places = {
        "host": {"host": "h1", "rack": "r1", "zone": "z1"},
        "rack": {"rack": "r1", "zone": "z1"},
        "zone": {"rack": "r2", "zone": "z1"},
        "other": {"rack": "r1", "zone": "z2"},
    }
    source = worker("prefill-0", **places["host"])
    ready = msgspec.structs.replace(kv_ready("request-1"), record=long())
    handle = msgspec.structs.replace(ready.handle, num_tokens=1024)
    ready = msgspec.structs.replace(ready, handle=handle)
    left = list(places)
    while len(left) > 1:
        beats = [worker(name, "decode", **places[name]) for name in left]
        assert route([source, *beats]).decode_worker(SERVED, ready) == left[0]
        left.pop(0)


def test_a_busy_neighbour_is_left_for_a_free_stranger() -> None:
    """When the transfer costs less than what the batch would."""
    source = worker("prefill-0", host="h1")
    near = worker("near", "decode", host="h1", num_running=60, context_tokens=600_000)
    far = worker("far", "decode")
    ready = msgspec.structs.replace(kv_ready("request-1"), record=long())
    assert route([source, near, far]).decode_worker(SERVED, ready) == "far"


def test_blocks_go_where_they_fit() -> None:
    """A decode worker without room for them comes only when nobody has."""
    full = worker("full", "decode", num_free_blocks=3)
    slow = worker("slow", "decode", num_running=50, context_tokens=100_000)
    ready = msgspec.structs.replace(kv_ready("request-1"), record=long())
    handle = msgspec.structs.replace(ready.handle, num_tokens=1024)
    ready = msgspec.structs.replace(ready, handle=handle)
    assert route([full, slow]).decode_worker(SERVED, ready) == "slow"
    both_full = [full, worker("slow", "decode", num_running=50, num_free_blocks=3)]
    assert route(both_full).decode_worker(SERVED, ready) == "full"


def test_a_prompt_is_computed_where_decode_workers_are_near() -> None:
    """The way of its blocks is part of the choice."""
    beats = [
        worker("a", zone="z1"), worker("b", zone="z2"), worker("d", "decode", zone="z2"),
    ]  # fmt: skip
    assert route(beats).place_prefill(long()).worker == "b"


@pytest.mark.parametrize(
    ("one", "other", "speed"),
    [
        (("a", "", ""), ("a", "", ""), 6.5),
        (("a", "r", "z"), ("b", "r", "z"), 5.0),
        (("a", "r", ""), ("b", "r", ""), 5.0),
        (("a", "r", "y"), ("b", "r", "z"), 1.0),
        (("a", "q", "z"), ("b", "r", "z"), 2.5),
        (("a", "", ""), ("b", "", ""), 1.0),
        (("a", "", "y"), ("a", "", "z"), 1.0),
        (("a", "q", "z"), ("a", "r", "z"), 2.5),
        (("a", "", "z"), ("b", "", "z"), 2.5),
    ],
)
def test_links_follow_labels(one: Any, other: Any, speed: float) -> None:
    """A rack is one of its zone; what is not said is nobody's."""
    assert Links().between(one, other) == Links().between(other, one) == speed


# Suffixes ---------------------------------------------------------------------------------------


def pools(**decode: Any) -> list[Beat]:
    return [worker("p0"), worker("p1"), worker("d0", "decode", "suffix", **decode)]


def test_a_short_rest_stays_with_who_holds_the_beginning() -> None:
    """No hop, no queue, no blocks to move. Nothing is fetched from anybody."""
    place = route(pools(), {"d0": 60}).place_prefill(long())
    assert (place.worker, place.reason, place.sources) == ("d0", "suffix", ())


@pytest.mark.parametrize(
    ("held", "decode", "rule"),
    [
        ({}, {}, SuffixRule()),  # nobody holds anything
        ({"d0": 20}, {}, SuffixRule()),  # 704 tokens are not short
        ({"d0": 60}, {}, SuffixRule(max_tokens=0)),
        ({"d0": 60}, {}, SuffixRule(hold_ms=5.0)),  # its streams would be held up for 11 ms
        ({"d0": 60, "p0": 64}, {"waiting_ms": 300.0}, SuffixRule()),  # prompts wait there
        ({"d0": 60}, {"num_free_slots": 0}, SuffixRule()),
    ],
)
def test_else_it_goes_to_the_prefill_pool(
    held: dict[str, int], decode: dict[str, Any], rule: SuffixRule
) -> None:
    """Each of the rules by itself is enough."""
    placement = route(pools(**decode), held, settings=settings_of(suffix=rule))
    assert placement.place_prefill(long()).worker in ("p0", "p1")


def test_a_short_prompt_that_nobody_holds_is_no_suffix() -> None:
    """Decode workers are for decoding: without a prefix there is a prefill pool."""
    placement = route(pools(), {"d0": 60})
    assert placement.place_prefill(long(32, 5000)).worker in ("p0", "p1")


def test_a_suffix_worker_is_none_of_the_prefill_pool() -> None:
    """It stays out of what is shared, and of what is placed for other reasons."""
    placement = route([worker("p0"), worker("d0", "decode", "suffix")])
    assert placement.place_prefill(long()).worker == ANY


# Policies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_places_with_who_has_room(policy: str) -> None:
    """Prefills and decodes, by name, and tells of each."""
    told: list[Placed] = []
    decisions: list[Decision] = []
    beats = [worker("p0"), worker("p1"), worker("d0", "decode"), worker("d1", "decode")]
    full = [worker("p2", num_free_slots=0), worker("d2", "decode", num_free_slots=0)]
    placement = route(
        [*beats, *full],
        policy=policy,
        on_placed=told.append,
        on_decision=decisions.append,
        process="control-1",
    )
    names = {placement.place_prefill(long()).worker for _ in range(40)}
    assert names == {"p0", "p1"}
    decoders = {placement.decode_worker(SERVED, kv_ready(f"request-{n}")) for n in range(40)}
    assert decoders == {"d0", "d1"}
    assert {(one.role, one.worker) for one in told} == {
        ("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1"),
    }  # fmt: skip
    assert all(one.process == "control-1" and one.served == SERVED for one in told)
    assert {(one.role, one.place.reason) for one in decisions} == {
        ("prefill", "load"), ("decode", "load"),
    }  # fmt: skip


def test_the_others_are_blind_for_prefixes() -> None:
    """Least loaded takes the idle one, whoever holds the prompt."""
    beats = [worker("holder", waiting_ms=50.0), worker("idle")]
    assert route(beats, {"holder": 64}).place_prefill(long()).worker == "holder"
    placement = route(beats, {"holder": 64}, "least-loaded")
    assert placement.place_prefill(long()).worker == "idle"
    assert not placement.knows_prefixes


def test_two_of_three_are_compared() -> None:
    """Power of two choices: the busiest of all is never taken, anybody else may be."""
    beats = [worker("a", waiting_ms=1e9), worker("b", waiting_ms=5e8), worker("c")]
    placement = route(beats, policy="power-of-two")
    placed = [placement.place_prefill(long(64, 5000 + n)).worker for n in range(60)]
    assert set(placed) == {"b", "c"}


def test_an_unknown_policy_is_refused() -> None:
    """By name, with those that there are."""
    with pytest.raises(ConfigError, match="least-loaded") as caught:
        route([], policy="round-robin")
    assert caught.value.param == "control.route_policy"


def test_a_worker_that_was_given_up_is_passed_over() -> None:
    """The fleet knows it first."""
    fleet = fleet_of(worker("a"), worker("b"))
    outlook = outlook_of(fleet)
    fleet.hear(msgspec.structs.replace(worker("a"), state="gone"), NOW_S)
    placement = placing(fleet, outlook=outlook)
    assert {placement.place_prefill(long()).worker for _ in range(3)} <= {"b", ANY}


def test_routers_that_hear_each_other_place_as_one() -> None:
    """Each counts what the other placed: together they go round as one alone would."""
    beats = [worker(f"w{n}") for n in range(4)]
    fleets = [fleet_of(*beats), fleet_of(*beats)]
    outlooks = [outlook_of(fleet) for fleet in fleets]

    def tell(number: int) -> Any:
        return lambda placed: outlooks[1 - number].hear_placed(placed, NOW_S)

    routers = [
        placing(fleets[n], outlook=outlooks[n], on_placed=tell(n), process=f"control-{n}")
        for n in range(2)
    ]
    placed = [routers[n % 2].place_prefill(long(512, 5000 + n)).worker for n in range(40)]
    assert {placed.count(f"w{n}") for n in range(4)} == {10}


@pytest.mark.parametrize("known", [True, False])
def test_mixed_knowledge_of_costs_is_no_error(known: bool) -> None:
    """One worker that does not know its costs: all compare by sequences."""
    odd = msgspec.structs.replace(worker("odd"), costs=COSTS if known else None)
    place = route([odd, worker("b", num_running=3)]).place_prefill(long())
    assert place.worker == "odd"
    assert bool(place.prefill_ms) is known


def test_a_fleet_without_workers_leaves_it_to_the_queue() -> None:
    """Nobody is there: whoever comes first."""
    placement = placing(Fleet(3.0, 0.0))
    assert placement.place_prefill(long()).worker == ANY
    assert placement.decode_worker(SERVED, kv_ready("request-1")) == ANY
