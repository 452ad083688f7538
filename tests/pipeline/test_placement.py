from __future__ import annotations

from itertools import count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.metrics import Metrics
from pipeline.fleet import Fleet
from pipeline.placement import Placement
from pipeline.prefix_hash import prefix_hashes, request_salt
from pipeline.prefixes import Prefixes
from pipeline.radix_index import RadixIndex
from schemas.codec import pack_ids
from schemas.control import Beat
from schemas.kv import KvReady, KvSource
from schemas.kv_events import KvTier
from schemas.requests import RequestRecord
from schemas.subjects import ANY
from tests.pipeline.placing import NOW_S, claimed, fleet_of, outlook_of, placing
from tests.pipeline.rig import SERVED, beat, kv_ready, record

RECORD = record("request-1")
_ids = count()


def place(placement: Placement, like: RequestRecord, num: int) -> list[str]:
    """Where so many requests go, one after the other."""
    records = [msgspec.structs.replace(like, request_id=f"r{next(_ids):08d}") for _ in range(num)]
    return [placement.place_prefill(one).worker for one in records]


loads = st.builds(
    dict,
    num_running=st.integers(0, 8),
    num_waiting=st.integers(0, 8),
    waiting_tokens=st.integers(0, 2048),
    num_free_slots=st.integers(0, 8),
)


def test_with_nobody_to_choose_from_the_queue_decides() -> None:
    """No worker yet, or a single one: whoever pulls first."""
    assert placing(fleet_of()).place_prefill(RECORD).worker == ANY
    assert placing(fleet_of(beat("w1", num_free_slots=4))).place_prefill(RECORD).worker == ANY


def test_the_only_one_is_known_as_long_as_it_is_the_only_one() -> None:
    """Where there is no choice the place is kept, until somebody comes or goes."""
    fleet = fleet_of(beat("w1", num_free_slots=0))
    outlook = outlook_of(fleet)
    placement = placing(fleet, outlook=outlook)

    def alone() -> str:
        place = placement.place_prefill(RECORD)
        assert place.worker == ANY, "nobody has a free place"
        return place.alone

    assert [alone(), alone()] == ["w1", "w1"]
    for state, expected in (("ready", ""), ("draining", "w1")):
        other = beat("w2", num_free_slots=0, state=state)
        fleet.hear(other, NOW_S)
        outlook.hear_beat(other, NOW_S)
        assert alone() == expected
    outlook.drop("w1")
    assert alone() == ""


def test_the_least_loaded_is_named() -> None:
    """What runs, what waits, and prompt tokens not computed yet all count."""
    busy = beat("w1", num_free_slots=4, num_running=2)
    idle = beat("w2", num_free_slots=4)
    assert placing(fleet_of(busy, idle)).place_prefill(RECORD).worker == "w2"
    long = beat("w2", num_free_slots=4, waiting_tokens=1024)
    assert placing(fleet_of(busy, long)).place_prefill(RECORD).worker == "w1"


def test_what_was_sent_counts_until_a_beat_tells_of_it() -> None:
    """Between two beats tasks go round; a beat that was measured after their claims tells the
    truth again."""
    fleet = fleet_of(beat("w1", num_free_slots=4), beat("w2", num_free_slots=4))
    outlook = outlook_of(fleet)
    placement = placing(fleet, outlook=outlook)
    records = [msgspec.structs.replace(RECORD, request_id=f"request-{n}") for n in range(4)]
    assert [placement.place_prefill(one).worker for one in records] == ["w1", "w2", "w1", "w2"]
    outlook.hear_beat(beat("w1", num_free_slots=4), NOW_S)
    assert outlook.queue_depth(beat("w1"), NOW_S) == 2  # they cross the beat
    for one in records[::2]:
        outlook.hear_claim(claimed("w1", one.request_id), NOW_S)
    outlook.hear_beat(beat("w1", num_free_slots=4), NOW_S)
    assert place(placement, RECORD, 2) == ["w1", "w1"]


def test_without_a_free_slot_a_task_goes_to_the_shared_queue() -> None:
    """The first one that has room takes it; nobody's own queue grows."""
    fleet = fleet_of(beat("w1", num_free_slots=1), beat("w2", num_free_slots=1))
    placement = placing(fleet)
    assert place(placement, RECORD, 3) == ["w1", "w2", ANY]


def decoder(worker: str, fingerprint: str, **load: int) -> Beat:
    return beat(worker, roles=("decode",), fingerprint=fingerprint, **load)


def test_blocks_go_only_to_who_can_read_them() -> None:
    """When some workers have another layout one is named, busy or not: the shared queue would
    give the task to any of them."""
    ready = kv_ready("request-1", fingerprint="f00d")
    able = decoder("w1", "f00d", num_running=8)
    other = decoder("w2", "beef", num_free_slots=8)
    assert placing(fleet_of(able, other)).decode_worker(SERVED, ready) == "w1"
    second = decoder("w3", "f00d", num_running=1)
    assert placing(fleet_of(able, other, second)).decode_worker(SERVED, ready) == "w3"


def test_when_all_can_read_or_none_the_usual_rules_hold() -> None:
    """Nothing is gained by naming one."""
    ready = kv_ready("request-1", fingerprint="f00d")
    assert placing(fleet_of(decoder("w1", "beef"))).decode_worker(SERVED, ready) == ANY
    alike = fleet_of(decoder("w1", "f00d"), decoder("w2", "f00d"))
    assert placing(alike).decode_worker(SERVED, ready) == ANY  # no free slots
    prefill_only = fleet_of(beat("w1", num_free_slots=4), beat("w2", num_free_slots=4))
    assert placing(prefill_only).decode_worker(SERVED, ready) == ANY


@settings(max_examples=25, deadline=None)
@given(st.lists(loads, min_size=2, max_size=5), st.integers(1, 40))
def test_nobody_gets_more_than_it_has_room_for(all_loads: list[dict[str, int]], tasks: int) -> None:
    """Whatever the loads: by name no more goes to a worker than the slots it said were free."""
    beats = [beat(f"w{n}", **load) for n, load in enumerate(all_loads)]
    placement = placing(fleet_of(*beats))
    placed = place(placement, RECORD, tasks)
    for one in beats:
        assert placed.count(one.worker) <= one.load.num_free_slots
    assert set(placed) <= {ANY, *(one.worker for one in beats)}


# What workers hold -----------------------------------------------------------------------------

PROMPT = tuple(range(1024))
LONG = msgspec.structs.replace(RECORD, prompt_ids=pack_ids(PROMPT))


def holder(worker: str, *, fingerprint: str = "f00d", roles: tuple[str, ...] = ("prefill",),
           **load: int) -> Beat:  # fmt: skip
    told = beat(worker, fingerprint=fingerprint, roles=roles, **{"num_free_slots": 64, **load})
    return msgspec.structs.replace(told, block_size=16)


def knowing(
    fleet: Fleet, held: dict[str, int], tier: KvTier = "device", fingerprint: str = "f00d"
) -> Placement:
    """A placement that knows how many blocks of ``LONG`` each of these holds."""
    index = RadixIndex(10_000)
    hashes = prefix_hashes(PROMPT, 16, request_salt(LONG, fingerprint))
    for worker, num_blocks in held.items():
        index.stored(worker, tier, hashes[:num_blocks])
    return placing(fleet, Prefixes(index, fleet, Metrics()))


def test_who_holds_the_prompt_computes_the_rest() -> None:
    """Of equally busy workers, and of one a little busier; nobody else is asked then."""
    fleet = fleet_of(holder("w1"), holder("w2", num_running=3), holder("w3"))
    place = knowing(fleet, {"w2": 64}).place_prefill(LONG)
    assert (place.worker, place.sources) == ("w2", ())
    assert knowing(fleet, {"w2": 64}).place_prefill(RECORD).worker == "w1"  # another prompt


def test_who_has_too_much_to_do_lends_instead() -> None:
    """Four sequences more, and another one computes the prompt, told whom to ask for it."""
    fleet = fleet_of(holder("w1"), holder("w2", num_running=5))
    place = knowing(fleet, {"w2": 64, "w1": 3}).place_prefill(LONG)
    assert place.worker == "w1"
    assert place.sources == (KvSource(worker="w2", num_blocks=64, tier="device"),)


def test_what_is_on_a_disk_counts_less_than_what_is_in_memory() -> None:
    """Half as much."""
    fleet = fleet_of(holder("w1"), holder("w2", num_running=1), holder("w3", num_running=1))
    assert knowing(fleet, {"w2": 32}, "host").place_prefill(LONG).worker == "w2"
    assert knowing(fleet, {"w2": 24}, "disk").place_prefill(LONG).worker == "w1"


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_one_hot_prefix_overloads_nobody(num_workers: int) -> None:
    """Though all requests share their prompt and one worker alone holds it, nobody is sent more
    than the credit above the others; a cold worker gets its share."""
    fleet = fleet_of(*(holder(f"w{n}") for n in range(num_workers)))
    placement = knowing(fleet, {"w0": 64})
    placed = place(placement, LONG, 10 * num_workers)
    counts = [placed.count(f"w{n}") for n in range(num_workers)]
    assert sum(counts) == 10 * num_workers
    assert max(counts) - min(counts) <= 5
    assert placed[:3] == ["w0"] * 3


def test_an_empty_newcomer_does_not_draw_all_that_nobody_knows() -> None:
    """Prompts without a match go round as if there were no index."""
    fleet = fleet_of(*(holder(f"w{n}") for n in range(4)))
    placement = knowing(fleet, {"w0": 64, "w1": 64, "w2": 64})
    placed = place(placement, RECORD, 40)
    assert [placed.count(f"w{n}") for n in range(4)] == [10] * 4


def test_sources_are_the_best_few_that_hold_more() -> None:
    """The longest first, of equals the fastest tier, then the least busy; three at most."""
    beats = [holder(f"w{n}", roles=("decode",), num_running=n) for n in range(1, 7)]
    fleet = fleet_of(holder("w0"), *beats)
    placement = knowing(fleet, {"w1": 10, "w2": 40, "w3": 40, "w4": 64, "w0": 10})
    place = placement.place_prefill(LONG)
    assert place.worker == ANY  # the only one that prefills
    assert [source.worker for source in place.sources] == ["w4", "w2", "w3"]
    assert [source.num_blocks for source in place.sources] == [64, 40, 40]


def test_blocks_of_another_layout_are_no_source() -> None:
    """In a fleet of two fingerprints a task names only what its worker can read; one for whoever
    comes names nothing."""
    fleet = fleet_of(holder("w1", num_running=9), holder("w2", fingerprint="beef"))
    placement = knowing(fleet, {"w1": 64})
    place = placement.place_prefill(LONG)
    assert (place.worker, place.sources) == ("w2", ())
    full = fleet_of(
        holder("w1", num_free_slots=0), holder("w2", fingerprint="beef", num_free_slots=0)
    )
    place = knowing(full, {"w1": 64}).place_prefill(LONG)
    assert (place.worker, place.sources) == (ANY, ())


def ready_for_long() -> KvReady:
    return msgspec.structs.replace(kv_ready("request-1"), record=LONG)


def test_of_equally_busy_decoders_the_one_that_holds_the_prompt() -> None:
    """What it holds it need not fetch; load comes first."""
    able = [holder(f"w{n}", roles=("decode",)) for n in range(3)]
    assert knowing(fleet_of(*able), {"w1": 64}).decode_worker(SERVED, ready_for_long()) == "w1"
    busy = [*able[:1], holder("w1", roles=("decode",), num_running=1), able[2]]
    assert knowing(fleet_of(*busy), {"w1": 64}).decode_worker(SERVED, ready_for_long()) == "w0"
    large = kv_ready("request-1")
    no_record = msgspec.structs.replace(large, record=None)
    assert knowing(fleet_of(*able), {"w1": 64}).decode_worker(SERVED, no_record) == "w0"


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["w0", "w1", "w2", "w3"]), st.integers(1, 64)),
    st.lists(loads, min_size=4, max_size=4),
)
def test_equal_fleets_and_indexes_give_equal_places(
    held: dict[str, int], all_loads: list[dict[str, int]]
) -> None:
    """Two control processes decide alike, whatever the order in which they heard."""
    beats = [holder(f"w{n}", **load) for n, load in enumerate(all_loads)]
    one = knowing(fleet_of(*beats), held)
    other = knowing(fleet_of(*reversed(beats)), dict(reversed(held.items())))
    for _ in range(8):
        assert one.place_prefill(LONG) == other.place_prefill(LONG)
