"""In which order requests that wait are let go."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.fair_queue import MAX_CLASS, OUTPUT_WEIGHT, FairQueue, Ticket
from pipeline.keyed_heap import KeyedHeap

AGING_S = 10.0


def ticket(
    request_id: str,
    tenant: str = "a",
    *,
    priority: int = 0,
    arrived_s: float = 0.0,
    num_uncached: int = 100,
    expected: float = 50.0,
) -> Ticket:
    return Ticket(
        request_id=request_id,
        served="tiny@r1",
        num_uncached=num_uncached,
        expected_tokens=expected,
        arrived_s=arrived_s,
        tenant=tenant,
        priority=priority,
    )


def queue_of(*tickets: Ticket) -> FairQueue:
    queue = FairQueue(aging_s=AGING_S)
    for one in tickets:
        queue.push(one)
    return queue


def popped(queue: FairQueue, number: int) -> list[str]:
    found = [queue.pop(0.0) for _ in range(number)]
    return [one.request_id for one in found if one is not None]


def drained(queue: FairQueue, now_s: float = 0.0) -> list[str]:
    order = []
    while (found := queue.pop(now_s)) is not None:
        order.append(found.request_id)
    return order


# Priority ------------------------------------------------------------------------------------


def test_the_highest_priority_goes_first() -> None:
    """Whoever came first, and however little its tenant was served."""
    low, high = ticket("low", "a"), ticket("high", "b", priority=2, arrived_s=1.0)
    assert drained(queue_of(low, high), now_s=1.0) == ["high", "low"]


def test_after_its_time_a_request_counts_as_one_priority_higher() -> None:
    """It then takes turns with that one; a moment earlier it does not."""
    pair = (ticket("low"), ticket("high", priority=1, arrived_s=5.0))
    assert drained(queue_of(*pair), now_s=AGING_S - 0.1) == ["high", "low"]
    assert drained(queue_of(*pair), now_s=AGING_S) == ["low", "high"]


def test_aging_goes_on() -> None:
    """Two priorities below takes twice the time."""
    pair = (ticket("low"), ticket("high", priority=2, arrived_s=5.0))
    assert drained(queue_of(*pair), now_s=2 * AGING_S - 0.1) == ["high", "low"]
    assert drained(queue_of(*pair), now_s=2 * AGING_S) == ["low", "high"]


def test_what_has_aged_does_not_overtake_what_is_important() -> None:
    """A long backlog of unimportant requests shares with the important ones of another tenant,
    and no more: those never wait behind all of it."""
    backlog = [ticket(f"low-{i}", "bulk", arrived_s=i * 0.01) for i in range(20)]
    queue = queue_of(*backlog)
    now_s = 100 * AGING_S
    queue.push(ticket("high-0", "chat", priority=1, arrived_s=now_s))
    queue.push(ticket("high-1", "chat", priority=1, arrived_s=now_s))
    order = drained(queue, now_s)
    assert order[:4] == ["low-0", "high-0", "low-1", "high-1"]


def test_priorities_beyond_the_classes_count_as_the_last_one() -> None:
    """So that no client can make more classes than are looked at in no time."""
    queue = FairQueue()
    for priority in range(-1000, 1001, 10):
        queue.push(ticket(str(priority), priority=priority))
    assert set(queue.num_waiting_by_level()) <= set(range(-MAX_CLASS, MAX_CLASS + 1))
    assert queue.num_waiting_by_level()[MAX_CLASS] > 1
    queue.check_invariants()


# Tenants -------------------------------------------------------------------------------------


def test_a_tenant_that_sends_ten_times_as_much_gets_as_much() -> None:
    """Both are served by turns until the small one has no more."""
    queue = FairQueue()
    for i in range(40):
        queue.push(ticket(f"big-{i}", "big", arrived_s=i))
    for i in range(4):
        queue.push(ticket(f"small-{i}", "small", arrived_s=50 + i))
    order = drained(queue, now_s=60.0)
    assert [order.index(f"small-{i}") for i in range(4)] == [1, 3, 5, 7]


def test_served_is_measured_in_tokens_not_in_requests() -> None:
    """One long prompt is as much as ten short ones; what is generated counts twice."""
    queue = FairQueue()
    for i in range(3):
        queue.push(ticket(f"long-{i}", "long", num_uncached=1000, expected=0))
    for i in range(30):
        queue.push(ticket(f"short-{i}", "short", num_uncached=50, expected=25))
    order = drained(queue)[:22]
    assert sum(one.startswith("short") for one in order) == 20


def test_who_was_idle_has_saved_nothing() -> None:
    """A tenant that begins to wait is lifted to those that wait already."""
    queue = FairQueue(credit_tokens=0.0)
    for i in range(50):
        queue.push(ticket(f"a-{i}", "a"))
    for _ in range(40):
        queue.pop(0.0)
    for i in range(10):
        queue.push(ticket(f"b-{i}", "b"))
    order = drained(queue)
    assert sum(one.startswith("b") for one in order[:10]) == 5


def test_who_uses_less_than_its_share_goes_at_once() -> None:
    """One request now and then, beside a tenant that always waits: each goes before the others,
    also the one after a long one, for much was done for them since."""
    queue = FairQueue(credit_tokens=1000.0)
    for i in range(100):
        queue.push(ticket(f"a-{i}", "a"))
    for i, (num, others) in enumerate(((900, 10), (100, 5), (100, 1))):
        assert all(one.startswith("a") for one in popped(queue, others))
        queue.push(ticket(f"b-{i}", "b", num_uncached=num))
        assert popped(queue, 1) == [f"b-{i}"]


def test_a_crowd_of_new_tenants_has_one_credit_each() -> None:
    """Each goes before those who wait with what its credit is; the last of them no more than the
    first, so that nobody can be overtaken without end."""
    queue = FairQueue(credit_tokens=1000.0)
    for i in range(50):
        queue.push(ticket(f"a-{i}", "a"))
    assert len(popped(queue, 30)) == 30
    level = queue.counter("a")
    for i in range(20):
        queue.push(ticket(f"new-{i}", f"new-{i}"))
    assert {queue.counter(f"new-{i}") for i in range(20)} == {level - 1000.0}


def test_who_is_behind_its_share_overtakes_until_it_has_had_it() -> None:
    """A tenant of which nobody waits, and for which less was done than for all who wait: as many
    of its requests as its credit is worth."""
    queue = FairQueue(credit_tokens=1000.0)
    assert not queue.overtakes(ticket("b-0", "b")), "nobody waits"
    for i in range(50):
        queue.push(ticket(f"a-{i}", "a"))
    popped(queue, 20)
    num_ahead = 0
    while queue.overtakes(one := ticket(f"b-{num_ahead}", "b")):
        queue.charge(one)
        num_ahead += 1
        queue.check_invariants()
    assert num_ahead == 1000 / (100 + OUTPUT_WEIGHT * 50)
    assert not queue.overtakes(ticket("a-50", "a")), "its own requests are before it"
    queue.push(ticket("b-waits", "b"))
    assert not queue.overtakes(ticket("b-late", "b"))
    assert queue.overtakes(ticket("c-0", "c"))


def test_nobody_overtakes_a_higher_priority() -> None:
    """However little was done for it; one of a higher priority than all overtakes."""
    queue = queue_of(*(ticket(f"a-{i}", "a", priority=1) for i in range(2)))
    popped(queue, 1)
    assert not queue.overtakes(ticket("b", "b"))
    assert queue.overtakes(ticket("b", "b", priority=1))
    assert queue.overtakes(ticket("b", "b", priority=2))


def test_a_question_changes_nothing() -> None:
    """Whoever is asked about has no account, and is lifted only when it comes."""
    queue = queue_of(ticket("a-0", "a"), ticket("a-1", "a"))
    queue.pop(0.0)
    queue.overtakes(ticket("b", "b"))
    assert queue.counter("b") == 0.0
    assert drained(queue) == ["a-1"]


def test_who_was_alone_owes_nothing() -> None:
    """What was served while nobody else waited is not held against a tenant."""
    queue = FairQueue(credit_tokens=0.0)
    for i in range(40):
        queue.push(ticket(f"alone-{i}", "a"))
        queue.pop(0.0)
    for i in range(10):
        queue.push(ticket(f"b-{i}", "b"))
        queue.push(ticket(f"a-{i}", "a"))
    assert sum(one.startswith("a") for one in drained(queue)[:10]) == 5


def test_the_end_corrects_the_charge() -> None:
    """Whoever got more tokens than was expected has paid for them; unknown ends are nothing."""
    queue = queue_of(ticket("one", expected=50.0))
    queue.pop(0.0)
    assert queue.counter("a") == 100 + OUTPUT_WEIGHT * 50
    queue.settle("one", 80)
    queue.settle("one", 1000)
    queue.settle("nobody", 5)
    assert queue.counter("a") == 100 + OUTPUT_WEIGHT * 80


def test_an_end_that_says_nothing_leaves_the_charge() -> None:
    """A request that broke off has used something, nobody knows how much."""
    queue = queue_of(ticket("one"))
    queue.pop(0.0)
    before = queue.counter("a")
    queue.settle("one", None)
    queue.settle("one", 80)
    assert queue.counter("a") == before


def test_who_comes_back_is_charged_once() -> None:
    """A request that was let go and could not be placed waits again."""
    queue = queue_of(ticket("one"))
    queue.pop(0.0)
    charged = queue.counter("a")
    queue.push(ticket("one"))
    queue.pop(0.0)
    assert queue.counter("a") == charged


def test_idle_tenants_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of tenants come from outside: memory does not grow with them."""
    monkeypatch.setattr("pipeline.fair_queue._MAX_IDLE_TENANTS", 8)
    monkeypatch.setattr("pipeline.fair_queue._MAX_CHARGED", 8)
    queue = FairQueue(credit_tokens=0.0)
    for i in range(100):
        queue.push(ticket(f"r-{i}", f"tenant-{i}"))
        queue.pop(0.0)
        queue.check_invariants()
    queue.settle("r-0", 5)  # forgotten, and nothing happens
    queue.push(ticket("again", "tenant-0"))
    assert queue.counter("tenant-0") >= queue.counter("tenant-99") > 0, "it is lifted like any"


# One request ---------------------------------------------------------------------------------


def test_a_request_waits_once() -> None:
    """Twice the same one is a mistake of the caller."""
    queue = queue_of(ticket("one"))
    with pytest.raises(ValueError, match="waits already"):
        queue.push(ticket("one"))


def test_who_was_given_back_keeps_its_place() -> None:
    """Within its tenant a request stands where its first arrival puts it."""
    queue = queue_of(ticket("b", arrived_s=2.0), ticket("c", arrived_s=3.0))
    queue.push(ticket("a", arrived_s=1.0))
    assert drained(queue, 5.0) == ["a", "b", "c"]


def test_what_is_removed_is_not_let_go_nor_charged() -> None:
    """Wherever in the queue it stands; removing it again is nothing."""
    queue = queue_of(ticket("one"), ticket("two"), ticket("three"))
    assert queue.remove("two") == ticket("two")
    assert queue.remove("two") is None
    assert "two" not in queue
    assert drained(queue) == ["one", "three"]
    assert queue.counter("a") == 2 * 200


# Invariants ----------------------------------------------------------------------------------

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from("abc"), st.integers(-3, 3), st.integers(1, 500)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 60)),
        st.tuples(st.just("settle"), st.integers(0, 60), st.integers(0, 500)),
        st.tuples(st.just("later"), st.floats(0, 30)),
    ),
    max_size=60,
)


@given(_STEPS)
def test_whatever_happens_its_views_agree(steps: list[tuple[object, ...]]) -> None:
    """Each request leaves once; who goes is of the highest class that counts; order in a tenant
    and class is that of arrival."""
    queue, now_s, inside = FairQueue(aging_s=AGING_S), 0.0, {}
    for number, (kind, *args) in enumerate(steps):
        if kind == "push":
            tenant, priority, size = args
            one = ticket(
                f"r{number}",
                str(tenant),
                priority=priority,  # type: ignore[arg-type]
                arrived_s=now_s,
                num_uncached=size,  # type: ignore[arg-type]
            )
            queue.push(one)
            inside[one.request_id] = one
        elif kind == "pop":
            found = queue.pop(now_s)
            assert (found is None) == (not inside)
            if found is not None:
                del inside[found.request_id]
                peers = [
                    one
                    for one in inside.values()
                    if (one.tenant, one.priority) == (found.tenant, found.priority)
                ]
                assert all(one.arrived_s >= found.arrived_s for one in peers)
        elif kind == "remove":
            assert queue.remove(f"r{args[0]}") == inside.pop(f"r{args[0]}", None)
        elif kind == "settle":
            queue.settle(f"r{args[0]}", args[1])  # type: ignore[arg-type]
        else:
            now_s += args[0]  # type: ignore[operator]
        assert len(queue) == len(inside)
        queue.check_invariants()


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 500)), min_size=30, max_size=60),
    st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 500)), min_size=30, max_size=60),
)
def test_two_tenants_that_both_wait_are_served_alike(
    sizes_a: list[tuple[int, int]], sizes_b: list[tuple[int, int]]
) -> None:
    """What they were served never differs by more than the largest single request."""
    queue = FairQueue()
    for tenant, sizes in (("a", sizes_a), ("b", sizes_b)):
        for i, (uncached, expected) in enumerate(sizes):
            queue.push(ticket(f"{tenant}{i}", tenant, num_uncached=uncached, expected=expected))
    largest = max(u + OUTPUT_WEIGHT * e for u, e in sizes_a + sizes_b)
    served: dict[str, float] = defaultdict(float)
    left = {"a": len(sizes_a), "b": len(sizes_b)}
    while all(left.values()):
        found = queue.pop(0.0)
        assert found is not None
        left[found.tenant] -= 1
        served[found.tenant] += found.num_uncached + OUTPUT_WEIGHT * found.expected_tokens
        assert abs(served["a"] - served["b"]) <= largest


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3))
def test_nothing_starves(seed: int, num_tenants: int, steps_below: int) -> None:
    """Under a flood of more important requests from several tenants, one of another tenant waits
    for as long as it takes to count as much, and then for one turn of each."""
    rng = random.Random(seed)
    queue = queue_of(ticket("patient", "patient"))
    now_s, num_after, number = 0.0, 0, 0
    while True:
        for tenant in range(num_tenants):
            number += 1
            queue.push(
                ticket(f"r{number}", f"t{tenant}", priority=steps_below, arrived_s=now_s,
                       num_uncached=rng.randint(100, 300), expected=0.0)
            )  # fmt: skip
        found = queue.pop(now_s)
        assert found is not None
        if found.request_id == "patient":
            break
        num_after += now_s >= steps_below * AGING_S
        now_s += 0.5
    assert now_s >= steps_below * AGING_S
    assert num_after <= 3 * num_tenants  # by then each of them has more than it


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.one_of(st.none(), st.integers(0, 9))),
        max_size=300,
    )
)
def test_a_heap_of_keys_is_a_sorted_dict(steps: list[tuple[str, int | None]]) -> None:
    """Put, move and discard in any order: the first is always the least of what is there."""
    heap: KeyedHeap[str, int] = KeyedHeap()
    oracle: dict[str, int] = {}
    for item, key in steps:
        if key is None:
            heap.discard(item)
            oracle.pop(item, None)
        else:
            heap.put(item, key)
            oracle[item] = key
        best = min(((key, item) for item, key in oracle.items()), default=None)
        assert heap.first() == (best and best[1])
        assert heap.least() == (best and best[0])
        assert len(heap) == len(oracle)
        heap.check_invariants()
