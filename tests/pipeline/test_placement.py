from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet import Fleet
from pipeline.placement import LeastLoaded
from schemas.control import Beat
from schemas.subjects import ANY
from tests.pipeline.rig import SERVED, beat, kv_ready, record

RECORD = record("request-1")
loads = st.builds(
    dict,
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 8),
    waiting_tokens=st.integers(0, 2048),
    num_free_slots=st.integers(0, 8),
)


def fleet_of(*beats: Beat) -> Fleet:
    fleet = Fleet(3.0, 0.0)
    for one in beats:
        fleet.hear(one, 1.0)
    return fleet


def test_with_nobody_to_choose_from_the_queue_decides() -> None:
    """No worker yet, or a single one: whoever pulls first."""
    assert LeastLoaded(fleet_of()).prefill_worker(RECORD) == ANY
    assert LeastLoaded(fleet_of(beat("w1", num_free_slots=4))).prefill_worker(RECORD) == ANY


def test_the_least_loaded_is_named() -> None:
    """What runs, what waits, and prompt tokens not computed yet all count."""
    busy = beat("w1", num_free_slots=4, num_running=2)
    idle = beat("w2", num_free_slots=4)
    assert LeastLoaded(fleet_of(busy, idle)).prefill_worker(RECORD) == "w2"
    long = beat("w2", num_free_slots=4, waiting_tokens=1024)
    assert LeastLoaded(fleet_of(busy, long)).prefill_worker(RECORD) == "w1"


def test_what_was_sent_counts_until_the_next_beat() -> None:
    """Between two beats tasks go round; a new beat tells the truth again."""
    fleet = fleet_of(beat("w1", num_free_slots=4), beat("w2", num_free_slots=4))
    placement = LeastLoaded(fleet)
    assert [placement.prefill_worker(RECORD) for _ in range(4)] == ["w1", "w2", "w1", "w2"]
    fleet.hear(beat("w1", num_free_slots=4), 1.5)
    assert [placement.prefill_worker(RECORD) for _ in range(2)] == ["w1", "w1"]


def test_without_a_free_slot_a_task_goes_to_the_shared_queue() -> None:
    """The first one that has room takes it; nobody's own queue grows."""
    fleet = fleet_of(beat("w1", num_free_slots=1), beat("w2", num_free_slots=1))
    placement = LeastLoaded(fleet)
    assert [placement.prefill_worker(RECORD) for _ in range(3)] == ["w1", "w2", ANY]


def decoder(worker: str, fingerprint: str, **load: int) -> Beat:
    return beat(worker, roles=("decode",), fingerprint=fingerprint, **load)


def test_blocks_go_only_to_who_can_read_them() -> None:
    """When some workers have another layout one is named, busy or not: the shared queue would
    give the task to any of them."""
    ready = kv_ready("request-1", fingerprint="f00d")
    able = decoder("w1", "f00d", num_running=8)
    other = decoder("w2", "beef", num_free_slots=8)
    assert LeastLoaded(fleet_of(able, other)).decode_worker(SERVED, ready) == "w1"
    second = decoder("w3", "f00d", num_running=1)
    assert LeastLoaded(fleet_of(able, other, second)).decode_worker(SERVED, ready) == "w3"


def test_when_all_can_read_or_none_the_usual_rules_hold() -> None:
    """Nothing is gained by naming one."""
    ready = kv_ready("request-1", fingerprint="f00d")
    assert LeastLoaded(fleet_of(decoder("w1", "beef"))).decode_worker(SERVED, ready) == ANY
    alike = fleet_of(decoder("w1", "f00d"), decoder("w2", "f00d"))
    assert LeastLoaded(alike).decode_worker(SERVED, ready) == ANY  # no free slots
    prefill_only = fleet_of(beat("w1", num_free_slots=4), beat("w2", num_free_slots=4))
    assert LeastLoaded(prefill_only).decode_worker(SERVED, ready) == ANY


@given(st.lists(loads, min_size=2, max_size=5), st.integers(1, 40))
def test_nobody_gets_more_than_it_has_room_for(all_loads: list[dict[str, int]], tasks: int) -> None:
    """Whatever the loads: by name no more goes to a worker than the slots it said were free."""
    beats = [beat(f"w{n}", **load) for n, load in enumerate(all_loads)]
    placement = LeastLoaded(fleet_of(*beats))
    placed = [placement.prefill_worker(RECORD) for _ in range(tasks)]
    for one in beats:
        assert placed.count(one.worker) <= one.load.num_free_slots
    assert set(placed) <= {ANY, *(one.worker for one in beats)}


def test_memory_does_not_grow_with_workers_that_left() -> None:
    """Worker ids are never used twice, so counts of those that left are dropped."""
    fleet = Fleet(3.0, 0.0)
    placement = LeastLoaded(fleet)
    for number in range(50):
        pair = (f"a{number}", f"b{number}")
        for worker in pair:
            fleet.hear(beat(worker, num_free_slots=4), 1.0)
        assert placement.prefill_worker(RECORD) in pair
        for worker in pair:
            fleet.hear(beat(worker, state="gone", num_free_slots=4), 1.0)
    assert len(placement._sent) <= 2
