"""How much room a pool has: levels, loads, capacities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.budget_books import Ahead
from pipeline.pool_load import (
    MAX_WEIGHED,
    Costed,
    DecodeRoom,
    Joining,
    Need,
    decode_capacity_ms,
    decode_rooms,
    level_ms,
    prefill_room,
)
from tests.pipeline.budget_rig import COSTS, House, Sequence, ask, decoder, prefiller

WAITS = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)


@settings(deadline=None)
@given(WAITS, st.floats(0, 1e6))
def test_queued_work_fills_up_to_the_level(waits: list[float], queued: float) -> None:
    """What is poured in is exactly what lies between the waits and the level."""
    level = level_ms(waits, queued)
    poured = sum(max(0.0, level - wait) for wait in waits)
    assert poured == pytest.approx(queued, abs=1e-3)


def test_who_is_not_heard_takes_nothing() -> None:
    """A stale worker is no vessel; without any other the level is infinite."""
    assert level_ms([math.inf, 100.0], 50.0) == 150.0
    assert level_ms([math.inf], 0.0) == math.inf


def test_the_worker_that_is_done_first_counts() -> None:
    """A fast worker with a queue beats a slow one without; what one holds of the prompt is free
    there, but for the last token."""
    slow = COSTS.__class__(**{**_fields(COSTS), "prefill_token_ms": 4.0})
    house = House(prefiller("fast"), prefiller("slow", costs=slow), decoder())
    beats = house.fleet.workers(ask("r").served, "prefill")
    room = prefill_room(Costed.of(beats, house), house, ask("r"), lambda _: Ahead(ms=600.0))
    assert room is not None
    assert (room.worker, room.start_ms, room.own_ms) == ("fast", 300, 500)
    holder = ask("r", num_cached={"slow": 500})
    room = prefill_room(Costed.of(beats, house), house, holder, lambda _: Ahead(ms=600.0))
    assert room is not None
    assert (room.worker, room.own_ms) == ("slow", 4.0)


def test_a_long_prompt_is_not_refused_for_being_long() -> None:
    """Loads count what is before a request: an idle pool has load 0 for whatever can be served
    in time at all, and no load is finite for what can't."""
    house = House(prefiller(), decoder())
    beats = house.fleet.workers(ask("r").served, "prefill")
    room = prefill_room(
        Costed.of(beats, house), house, ask("r", num_prompt=1900), lambda _: Ahead()
    )
    assert room is not None
    assert room.load(2000.0) == 0.0
    assert room.load(1900.0) == math.inf


def test_loads_of_a_decode_worker() -> None:
    """Of the time that a step may take: less its base, less the request's own part. Of memory:
    less the request's own."""
    room = DecodeRoom(
        costs=COSTS, num_sequences=20, context_tokens=0, used_tokens=300, total_tokens=1000
    )
    need = Need(num_choices=2, num_prompt=200, num_tokens=200)
    assert room.tbt_load(50.0) == 20 / 40
    assert room.tbt_load(50.0, need) == 20 / 38
    assert room.tbt_load(12.0, need) == math.inf
    assert room.kv_load(need) == 300 / 600


def test_a_token_is_later_by_its_part_of_the_way_in() -> None:
    """Keys and values that wait 400 ms for the way, and take 200 themselves, make each of a hundred
    tokens 6 ms later; a long answer bears more of that than a short one."""
    room = DecodeRoom(
        costs=COSTS, num_sequences=20, context_tokens=0, used_tokens=300, total_tokens=1000,
        way_ms=400.0, way_token_ms=1.0, num_steps=100.0,
    )  # fmt: skip
    assert room.tbt_load(50.0) == (20 + 4) / 40
    need = Need(num_choices=2, num_prompt=200, num_tokens=200)
    assert room.tbt_load(50.0, need) == (20 + 4) / (38 - 2)


def test_who_is_prefilled_before_it_shares_the_batch() -> None:
    """Sequences that nobody has yet are in every worker's batch, each its part of them."""
    house = House(prefiller(), decoder())
    house.workers["d1"].batch = [Sequence("old", 100, 1000)]
    beats = house.fleet.workers(ask("r").served, "decode")
    (room,) = decode_rooms(beats, house, 0.0, Joining(1.5, 300.0))
    assert (room.num_sequences, room.context_tokens, room.used_tokens) == (2.5, 400, 400)


def test_of_many_workers_the_least_busy_are_weighed() -> None:
    """A decision among hundreds does not ask each what it will be doing."""
    house = House(prefiller(), *(decoder(f"d{number:03}") for number in range(100)))
    beats = house.fleet.workers(ask("r").served, "decode")
    assert len(decode_rooms(beats, house, 0.0, Joining())) == MAX_WEIGHED


def test_decode_capacity_follows_the_workers() -> None:
    """It is the part of a step that sequences share, times the horizon, of every worker."""
    assert decode_capacity_ms([COSTS, COSTS], 50.0, 1000.0) == 2 * 800.0
    assert decode_capacity_ms([COSTS], 5.0, 1000.0) == 0.0
    assert decode_capacity_ms([COSTS], 0.0, 1000.0) == math.inf


def _fields(struct: object) -> dict[str, float]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]
