"""Who goes first when a tier is full."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv.api import BlockName
from workers.kv.eviction import LrfuPolicy, LruPolicy

ROOT = bytes(16)


def name(number: int) -> bytes:
    return number.to_bytes(16)


def block(number: int, parent: int = 0) -> BlockName:
    return BlockName(block_hash=name(number), parent=name(parent))


class PolicyMachine(RuleBasedStateMachine):
    """A tier of blocks in a tree, some of them pinned, against a model that looks at them all."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.parents: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.last_victims: list[int] = []

    def make(self) -> LrfuPolicy | LruPolicy:
        return LrfuPolicy(max_share=0.3)

    def leaves(self) -> set[int]:
        return self.parents.keys() - set(self.parents.values())

    @rule(number=st.integers(1, 30), parent=st.integers(0, 30))
    def add(self, number: int, parent: int) -> None:
        """Also before its parent, and again after it went. A child has the larger number, as a
        hash chain has no circles."""
        if parent < number:
            parent = self.parents.setdefault(number, parent)
            self.policy.added(block(number, parent))

    @rule(number=st.integers(1, 30))
    def use(self, number: int) -> None:
        self.policy.used(name(number))

    @rule(number=st.integers(1, 30))
    def remove(self, number: int) -> None:
        self.parents.pop(number, None)
        self.pinned.discard(number)
        self.policy.removed(name(number))

    @rule(number=st.integers(1, 30))
    def pin(self, number: int) -> None:
        if number in self.parents:
            self.pinned ^= {number}

    @rule(count=st.integers(1, 10), preferred=st.sets(st.integers(1, 30)))
    def choose(self, count: int, preferred: set[int]) -> None:
        pinned = {name(number) for number in self.pinned}
        prefer = None if not preferred else lambda h: int.from_bytes(h) in preferred
        victims = [int.from_bytes(h) for h in self.policy.victims(count, pinned, prefer)]
        share = int(0.3 * (len(self.parents) - len(self.pinned)))
        assert len(victims) <= min(count, max(1, share))
        assert len(set(victims)) == len(victims)
        assert not set(victims) & self.pinned
        assert bool(victims) == bool(self.leaves() - self.pinned)
        for position, victim in enumerate(victims):
            children = {child for child, parent in self.parents.items() if parent == victim}
            assert children <= set(victims[:position]), "a parent goes before its child"
        self.last_victims = victims

    @precondition(lambda self: self.last_victims)
    @rule(share=st.integers(0, 10))
    def evict(self, share: int) -> None:
        """The tier takes some of what was offered, or none."""
        for victim in self.last_victims[:share]:
            self.remove(victim)
        self.last_victims = []

    @invariant()
    def holds(self) -> None:
        self.policy.check_invariants()
        assert len(self.policy) == len(self.parents)
        if isinstance(self.policy, LrfuPolicy):
            assert self.policy.num_ghosts <= len(self.parents) + 1


class LruMachine(PolicyMachine):
    def make(self) -> LrfuPolicy | LruPolicy:
        return LruPolicy(max_share=0.3)


TestLrfu = PolicyMachine.TestCase
TestLrfu.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_lru_takes_the_one_that_was_used_longest_ago() -> None:
    """Without a tree and pins, LRU is the order of last uses."""
    rng = random.Random(5)
    policy, order = LruPolicy(max_share=1.0), list(range(1, 41))
    for number in order:
        policy.added(block(number))
    for _ in range(500):
        number = rng.choice(order)
        order.remove(number)
        order.append(number)
        policy.used(name(number))
    assert policy.victims(40) == [name(number) for number in order]


def test_the_worth_of_a_block_is_the_faded_sum_of_its_uses() -> None:
    """The order is that of a sum over all uses, each worth half as much after a half-life."""
    rng = random.Random(6)
    num, half_life = 30, 1.5
    policy = LrfuPolicy(max_share=1.0, half_life=half_life)
    for number in range(1, num + 1):
        policy.added(block(number))
    uses: dict[int, list[float]] = {number: [] for number in range(1, num + 1)}
    for now in range(2000):
        number = min(num, int(rng.paretovariate(0.7)))
        policy.used(name(number))
        uses[number].append(now)
    worth = {
        number: sum(2.0 ** ((at - 2000) / (half_life * num)) for at in times)
        for number, times in uses.items()
        if times
    }
    expected = sorted(worth, key=worth.__getitem__)
    got = [int.from_bytes(h) for h in policy.victims(num)]
    assert [number for number in got if number in worth] == expected


def test_a_block_used_twice_outlives_a_scan() -> None:
    """What is used once, however late, goes before what was used twice not long before."""
    policy = LrfuPolicy(max_share=1.0)
    for number in range(1, 11):
        policy.added(block(number))
    policy.used(name(1))
    for number in range(11, 21):
        policy.added(block(number))
    assert name(1) not in policy.victims(15)
    policy.check_invariants()


def test_a_block_that_comes_back_is_remembered() -> None:
    """Its uses before it was evicted count."""
    policy = LrfuPolicy(max_share=1.0)
    for number in range(1, 6):
        policy.added(block(number))
    for _ in range(3):
        policy.used(name(1))
    policy.removed(name(1))
    policy.added(block(1))
    policy.added(block(6))
    assert policy.victims(6)[-1] == name(1)


def test_what_a_lower_tier_has_goes_first() -> None:
    """Of the candidates, the preferred ones; the others when those don't suffice."""
    policy = LruPolicy(max_share=1.0)
    for number in range(1, 7):
        policy.added(block(number))
    assert policy.victims(2, prefer=lambda h: h in (name(2), name(6))) == [name(2), name(1)]
    assert policy.victims(6, prefer=lambda h: h == name(6))[0] == name(6)


def test_one_cycle_gives_no_more_than_its_share() -> None:
    """Counted over what can be evicted; one block is always given."""
    policy = LrfuPolicy(max_share=0.1)
    for number in range(1, 101):
        policy.added(block(number))
    pinned = {name(number) for number in range(1, 51)}
    assert len(policy.victims(100)) == 10
    assert len(policy.victims(100, pinned)) == 5
    pinned |= {name(number) for number in range(51, 100)}
    assert policy.victims(100, pinned) == [name(100)]


@pytest.mark.parametrize("policy", [LrfuPolicy(max_share=1.0), LruPolicy(max_share=1.0)])
def test_a_chain_goes_from_its_end(policy: LrfuPolicy | LruPolicy) -> None:
    """Even when its first block was used least."""
    for number in range(1, 9):
        policy.added(block(number, number - 1))
    policy.used(name(8))
    assert policy.victims(8) == [name(number) for number in range(8, 0, -1)]
