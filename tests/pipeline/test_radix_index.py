"""The index against a naive table of sets, and what it promises of memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.prefix_hash import block_hash, salt_of
from pipeline.prefix_walk import TIERS, Match
from pipeline.radix_index import RadixIndex
from schemas.kv_events import KvTier

DEPTH = 7
WORKERS = ("a", "b", "c", "d")
PROMPTS = tuple(itertools.product((0, 1), repeat=DEPTH))

workers = st.sampled_from(WORKERS)
tiers = st.sampled_from(TIERS)
some_tiers = st.lists(tiers, min_size=1, unique=True)
prompts = st.sampled_from(PROMPTS)
depths = st.integers(0, DEPTH)


def hashes_of(prompt: tuple[int, ...]) -> list[bytes]:
    found, parent = [], salt_of("test")
    for token in prompt:
        parent = block_hash(parent, (token,))
        found.append(parent)
    return found


class Naive:
    """What an index would be if neither time nor memory counted."""

    def __init__(self) -> None:
        self.held: dict[str, dict[KvTier, set[bytes]]] = {}

    def of(self, worker: str) -> dict[KvTier, set[bytes]]:
        return self.held.setdefault(worker, {tier: set() for tier in TIERS})

    def blocks(self, worker: str) -> dict[bytes, tuple[KvTier, ...]]:
        sets = self.held.get(worker, {tier: set() for tier in TIERS})
        return {
            one: tuple(tier for tier in TIERS if one in sets[tier])
            for one in set().union(*sets.values())
        }

    def lookup(self, hashes: list[bytes]) -> list[Match]:
        found = []
        for worker in sorted(self.held):
            sets = self.of(worker)
            far = [_leading(hashes, *(sets[t] for t in TIERS[:n])) for n in (3, 2, 1)]
            if far[0]:
                found.append(Match(worker, *far))
        return found


def _leading(hashes: list[bytes], *sets: set[bytes]) -> int:
    allowed = set().union(*sets)
    return sum(1 for _ in itertools.takewhile(allowed.__contains__, hashes))


class AgainstNaive(RuleBasedStateMachine):
    """Whatever happens in whatever order, the index and the naive one answer alike."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(1000)
        self.naive = Naive()

    @rule(worker=workers, tiers=some_tiers, prompt=prompts, start=depths, end=depths)
    def stored(
        self, worker: str, tiers: list[KvTier], prompt: tuple[int, ...], start: int, end: int
    ) -> None:
        """Also without the blocks before them: nobody need have heard of a parent."""
        some = hashes_of(prompt)[start:end]
        self.index.stored(worker, tiers[0], some, tiers[1:])
        for tier in tiers:
            self.naive.of(worker)[tier] |= set(some)

    @rule(worker=workers, tiers=some_tiers, prompt=prompts, start=depths, end=depths)
    def removed(
        self, worker: str, tiers: list[KvTier], prompt: tuple[int, ...], start: int, end: int
    ) -> None:
        some = hashes_of(prompt)[start:end]
        self.index.removed(worker, tiers[0], some, tiers[1:])
        for tier in tiers:
            self.naive.of(worker)[tier] -= set(some)

    @rule(worker=workers)
    def drop(self, worker: str) -> None:
        self.index.drop(worker)
        self.naive.held.pop(worker, None)

    @rule(steps=st.integers(1, 20))
    def sweep(self, steps: int) -> None:
        self.index.sweep(steps)

    @rule(prompt=prompts, depth=depths)
    def touch(self, prompt: tuple[int, ...], depth: int) -> None:
        self.index.touch(hashes_of(prompt)[:depth])

    @rule(prompt=prompts, depth=depths)
    def lookup(self, prompt: tuple[int, ...], depth: int) -> None:
        hashes = hashes_of(prompt)[:depth]
        assert self.index.lookup(hashes) == self.naive.lookup(hashes)

    @rule(prompt=prompts, asked=st.sets(workers), more_than=depths)
    def find(self, prompt: tuple[int, ...], asked: set[str], more_than: int) -> None:
        """What is found of some workers says of all of them at once what each match says."""
        hashes, roll = hashes_of(prompt), self.index.roll
        found = self.index.lookup_runs([hashes[:2], hashes[2:]], roll.bits(asked))
        matches = [one for one in self.naive.lookup(hashes) if one.worker in asked]
        assert list(found.values()) == matches
        assert (len(found), bool(found)) == (len(matches), bool(matches))
        assert found.most == max((one.num_blocks for one in matches), default=0)
        further = {
            (one.num_blocks, one.tier, one.worker) for one in matches if one.num_blocks > more_than
        }
        groups = list(found.furthest(more_than))
        assert {(num, tier, one) for num, tier, some in groups for one in some} == further
        assert groups == sorted(groups, key=lambda one: (-one[0], TIERS.index(one[1])))
        worth = [0.0] * (len(roll.workers) + 1)
        for one in matches:
            in_memory, on_disk = one.num_memory, one.num_blocks - one.num_memory
            worth[roll.places[one.worker]] = in_memory + 0.25 * on_disk
        assert not found or found.worth(0.25).tolist() == worth

    @invariant()
    def holds_the_same(self) -> None:
        self.index.check_invariants()
        for worker in WORKERS:
            assert self.index.held_by(worker) == self.naive.blocks(worker)
        everything = [self.naive.blocks(worker) for worker in WORKERS]
        assert self.index.num_blocks == len(set().union(*everything))

    @precondition(lambda self: len(self.naive.held) == 0)
    @rule()
    def nothing_is_left(self) -> None:
        """With everybody gone a full sweep leaves an empty table, one that had begun before too."""
        self.index.sweep(10_000)
        self.index.sweep(10_000)
        assert not self.index._blocks
        assert not self.index._sets._by_bits


class Bounded(RuleBasedStateMachine):
    """With less room than there are blocks it forgets, and never claims what is not so."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex(12)
        self.naive = Naive()

    @rule(worker=workers, tier=tiers, prompt=prompts, depth=depths)
    def stored(self, worker: str, tier: KvTier, prompt: tuple[int, ...], depth: int) -> None:
        some = hashes_of(prompt)[:depth]
        self.index.stored(worker, tier, some)
        self.naive.of(worker)[tier] |= set(some)

    @rule(worker=workers, tier=tiers, prompt=prompts, depth=depths)
    def removed(self, worker: str, tier: KvTier, prompt: tuple[int, ...], depth: int) -> None:
        some = hashes_of(prompt)[depth:]
        self.index.removed(worker, tier, some)
        self.naive.of(worker)[tier] -= set(some)

    @rule(worker=workers)
    def drop(self, worker: str) -> None:
        self.index.drop(worker)
        self.naive.held.pop(worker, None)

    @rule(prompt=prompts)
    def looks_and_touches(self, prompt: tuple[int, ...]) -> None:
        hashes = hashes_of(prompt)
        true = {match.worker: match for match in self.naive.lookup(hashes)}
        for match in self.index.lookup(hashes):
            assert match.num_blocks <= true[match.worker].num_blocks
            assert match.num_memory <= true[match.worker].num_memory
            assert match.num_device <= true[match.worker].num_device
            self.index.touch(hashes[: match.num_blocks])

    @rule(steps=st.integers(1, 20))
    def sweep(self, steps: int) -> None:
        self.index.sweep(steps)

    @invariant()
    def is_bounded(self) -> None:
        self.index.check_invariants()
        assert len(self.index._blocks) <= 12


TestAgainstNaive = AgainstNaive.TestCase
TestBounded = Bounded.TestCase
TestAgainstNaive.settings = TestBounded.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_oldest_untouched_go_first_and_of_a_run_its_end() -> None:
    """A prompt that is used stays, an older one that is not goes, from its last block on."""
    index = RadixIndex(8)
    old, used, new = (hashes_of((number, 0, 0))[:3] for number in (7, 8, 9))
    index.stored("a", "device", old)
    index.stored("a", "device", used)
    index.touch(used)
    index.touch(old[:1])
    index.stored("a", "device", new)
    assert [index.lookup(one)[0].num_blocks for one in (old, used, new)] == [2, 3, 3]
    assert index.num_evicted == 1


def test_ten_times_as_many_prefixes_as_room_change_nothing_but_what_is_known() -> None:
    """Memory is that of ``max_blocks``, however many distinct prefixes come by."""
    index = RadixIndex(500)
    for number in range(5000):
        index.stored(f"w{number % 3}", "host", hashes_of((number,)))
    index.check_invariants()
    assert index.num_blocks <= 500
    assert index.num_evicted >= 4500
    assert index.lookup(hashes_of((4999,)))


def test_a_worker_that_left_makes_room_for_the_next() -> None:
    """Places are used again: a thousand restarts do not make the sets of holders longer, and
    nobody inherits anything."""
    index = RadixIndex(100)
    hashes = hashes_of((1, 2, 3))
    index.stored("stays", "host", hashes[:1])
    for number in range(1000):
        index.stored(f"w{number}", "device", hashes)
        assert [match.worker for match in index.lookup(hashes)] == ["stays", f"w{number}"]
        index.drop(f"w{number}")
        assert [match.worker for match in index.lookup(hashes)] == ["stays"]
        index.sweep(100)
    assert len(index._workers) == 2
    assert max(holders.bits for holders in index._sets._by_bits.values()) < 1 << 6
    index.check_invariants()


def test_the_slowest_tier_that_is_needed_is_told() -> None:
    """A match says what can be read from where, and what all of it needs."""
    index = RadixIndex(100)
    hashes = hashes_of((1, 2, 3, 4))
    index.stored("a", "device", hashes[:1])
    index.stored("a", "host", hashes[:3])
    index.stored("a", "disk", hashes)
    (match,) = index.lookup(hashes)
    assert match == Match("a", num_blocks=4, num_memory=3, num_device=1)
    assert match.tier == "disk"
    assert index.lookup(hashes[:3])[0].tier == "host"
    assert index.lookup(hashes[:1])[0].tier == "device"
    assert index.lookup(hashes[1:]) == [Match("a", 3, 2, 0)]


def test_a_lookup_takes_few_more_hashes_than_it_needs() -> None:
    """Whoever hashes while it asks hashes little in vain: one block for an unknown prompt."""
    index = RadixIndex(1000)
    hashes = hashes_of(tuple(range(400)))
    unknown = iter(hashes)
    assert index.lookup(unknown) == []
    assert list(unknown) == hashes[1:]
    index.stored("a", "device", hashes[:100])
    known = iter(hashes)
    assert index.lookup(known) == [Match("a", 100, 100, 100)]
    assert len(list(known)) >= 200


long_slices = st.lists(
    st.tuples(
        st.booleans(), workers, tiers, st.sampled_from((0, 1)), st.integers(0, 200),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=25,
)  # fmt: skip
LONG = {fork: hashes_of((0,) * 70 + (fork,) * 130) for fork in (0, 1)}


@settings(deadline=None)
@given(long_slices)
def test_long_runs_are_cut_and_joined_without_a_mistake(
    events: list[tuple[bool, str, KvTier, int, int, int]],
) -> None:
    """Two prompts that part after 70 blocks, stored and removed in long pieces: a look-up that
    looks at a few blocks only finds what one that looks at all of them would."""
    index, naive = RadixIndex(1000), Naive()
    for is_stored, worker, tier, fork, start, end in events:
        some = LONG[fork][start:end]
        if is_stored:
            index.stored(worker, tier, some)
            naive.of(worker)[tier] |= set(some)
        else:
            index.removed(worker, tier, some)
            naive.of(worker)[tier] -= set(some)
        for hashes in LONG.values():
            for first in (0, start):
                assert index.lookup(hashes[first:]) == naive.lookup(hashes[first:])
    index.check_invariants()


def test_what_lies_between_two_runs_of_a_chain_is_never_passed_over() -> None:
    """Three runs that a look-up has tied together; then the one in the middle loses a block, or is
    broken already when they are passed: nobody holds what lies behind the gap."""
    for looks_before in (True, False):
        index, hashes = RadixIndex(1000), LONG[0][:192]
        for start in (0, 64, 128):
            index.stored("a", "device", hashes[start : start + 64])
        for number in range(2 * looks_before):
            assert index.lookup_runs([hashes])["a"] == (Match("a", 192, 192, 192)), number
        index.stored("b", "device", hashes[80:81])
        for _ in range(2):
            assert index.lookup_runs([hashes])["a"] == (Match("a", 192, 192, 192))
        index.removed("a", "device", hashes[80:81])
        for _ in range(2):
            assert index.lookup_runs([hashes])["a"] == (Match("a", 80, 80, 80))
        index.check_invariants()


@pytest.mark.parametrize("size", [0, -1])
def test_room_for_nothing_is_refused(size: int) -> None:
    """An index that can hold nothing is a mistake."""
    with pytest.raises(ValueError, match="max_blocks"):
        RadixIndex(size)


@given(st.lists(st.tuples(workers, tiers, prompts), max_size=20), prompts)
def test_equal_events_give_equal_answers(
    events: list[tuple[str, KvTier, tuple[int, ...]]], prompt: tuple[int, ...]
) -> None:
    """Two control processes that heard the same, in another order, agree."""
    one, other = RadixIndex(1000), RadixIndex(1000)
    for worker, tier, stored in events:
        one.stored(worker, tier, hashes_of(stored))
    for worker, tier, stored in reversed(events):
        other.stored(worker, tier, hashes_of(stored))
    assert one.lookup(hashes_of(prompt)) == other.lookup(hashes_of(prompt))
