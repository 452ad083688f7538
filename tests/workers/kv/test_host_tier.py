"""Blocks in host memory: what is found, what stays, what goes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from infra.transport.shm import SharedPool
from workers.kv.api import BlockName, Filling, Pin, Tier
from workers.kv.eviction import LrfuPolicy
from workers.kv.host_tier import HostPool
from workers.kv.tally import TierTally

NUM_DEVICE = 3
ROOT = b"salt"


def chain(letter: str, count: int) -> list[BlockName]:
    """The blocks of one prompt: a, ab, abc ... by name."""
    hashes = [ROOT, *(f"{letter}{number}".encode() for number in range(count))]
    return [BlockName(block_hash=h, parent=p) for p, h in pairwise(hashes)]


def hashes_of(blocks: list[BlockName]) -> list[bytes]:
    return [block.block_hash for block in blocks]


class Events:
    """What a listener believes to be there."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def stored(self, tier: Tier, *blocks: BlockName) -> None:
        assert tier == "host"
        for block in blocks:
            assert block.block_hash not in self.held, "stored twice"
            self.held[block.block_hash] = block.parent

    def removed(self, tier: Tier, *hashes: bytes) -> None:
        assert tier == "host"
        for block_hash in hashes:
            del self.held[block_hash]


def make_tier(num_slots: int = 4, *, share: float = 1.0) -> tuple[HostPool, TierTally, Events]:
    tally, events = TierTally(), Events()
    memory = SharedPool(NUM_DEVICE + num_slots, 64)
    policy = LrfuPolicy(max_share=share)
    return HostPool(memory, NUM_DEVICE, policy=policy, tally=tally, events=events), tally, events


def put(tier: HostPool, blocks: list[BlockName]) -> Filling:
    filling = tier.reserve(blocks)
    for slot in filling.slots:
        tier.memory.slots[slot] = slot
    tier.commit(filling, [slot * 1000 for slot in filling.slots])
    tier.check_invariants()
    return filling


def test_blocks_are_found_from_their_commit_on() -> None:
    """Nobody finds what is still being filled, nor gets a slot for it twice; afterwards it is
    found with its slot and checksum, in the slots behind the engine's."""
    tier, _, events = make_tier()
    blocks = chain("a", 3)
    filling = tier.reserve(blocks)
    assert filling.blocks == tuple(blocks)
    assert min(filling.slots) >= NUM_DEVICE
    assert tier.num_leading(hashes_of(blocks)) == 0
    assert tier.reserve(blocks).slots == ()
    tier.commit(filling, [1, 2, 3])
    pin = tier.pin([*hashes_of(blocks), b"unknown"])
    assert (pin.blocks, pin.slots, pin.checksums) == (tuple(blocks), filling.slots, (1, 2, 3))
    assert events.held == {block.block_hash: block.parent for block in blocks}
    tier.unpin(pin)
    tier.check_invariants()


def test_a_prefix_ends_at_its_first_gap() -> None:
    """Only blocks without a gap before them count: the rest can't be used."""
    tier, _, _ = make_tier()
    blocks = chain("a", 3)
    put(tier, [blocks[0], blocks[2]])
    assert tier.num_leading(hashes_of(blocks)) == 1
    assert len(tier.pin(hashes_of(blocks)).slots) == 1


def test_a_part_of_a_filling_can_be_given_up() -> None:
    """What was not written is free again, what was written is found."""
    tier, _, events = make_tier(2)
    blocks = chain("a", 2)
    filling = tier.reserve(blocks)
    tier.commit(filling.part([0]), [7])
    tier.abort(filling.part([1]))
    tier.check_invariants()
    assert set(events.held) == {blocks[0].block_hash}
    assert tier.reserve(chain("b", 1)).slots == (filling.slots[1],)


def test_a_commit_needs_every_checksum() -> None:
    """One checksum per slot, or nothing happens."""
    tier, _, _ = make_tier()
    filling = tier.reserve(chain("a", 2))
    with pytest.raises(ValueError, match="1 checksums for 2"):
        tier.commit(filling, [1])
    tier.commit(filling, [1, 2])


def test_pinned_blocks_and_their_parents_stay() -> None:
    """Room is made of what nobody pins; a pinned block's parents are of use to it, and stay."""
    tier, tally, _ = make_tier(4)
    old, new = chain("a", 2), chain("b", 2)
    put(tier, old)
    put(tier, new)
    pin = tier.pin(hashes_of(old))
    assert len(tier.reserve(chain("c", 4)).slots) == 2
    assert tier.num_leading(hashes_of(old)) == 2
    assert tier.num_leading(hashes_of(new)) == 0
    assert tally.count("host", "dropped") == 2 + 2  # two made room, for two there was none
    tier.unpin(pin)
    tier.check_invariants()


def test_new_blocks_do_not_push_out_their_own_parents() -> None:
    """A block whose parent had to go for it would be of no use."""
    tier, _, _ = make_tier(3)
    blocks = chain("a", 5)
    put(tier, blocks[:3])
    assert tier.reserve(blocks[3:]).slots == ()
    assert tier.num_leading(hashes_of(blocks)) == 3


def test_what_a_lower_tier_has_goes_first() -> None:
    """Of blocks of about the same worth those go that a lower tier has: they are not lost."""
    tier, tally, _ = make_tier(4)
    blocks = [chain(letter, 1)[0] for letter in "abcd"]
    for block in blocks:
        put(tier, [block])
    below = {blocks[1].block_hash, blocks[2].block_hash}
    tier.is_below = lambda block_hash: block_hash in below
    put(tier, [chain("e", 1)[0], chain("f", 1)[0]])
    assert [tier.num_leading([block.block_hash]) for block in blocks] == [1, 0, 0, 1]
    assert (tally.count("host", "evicted"), tally.count("host", "dropped")) == (2, 0)


def test_one_cycle_evicts_its_share_at_most() -> None:
    """A flood of new blocks takes a tenth of the tier at once, however many it would like."""
    tier, _, _ = make_tier(20, share=0.1)
    put(tier, chain("a", 20))
    assert len(tier.reserve(chain("b", 15)).slots) == 2


def test_a_slot_gets_a_new_generation_before_it_is_written_anew() -> None:
    """Whoever reads the old content in another process notices."""
    tier, _, _ = make_tier(1)
    [slot] = put(tier, chain("a", 1)).slots
    before = int(tier.memory.generations[slot])
    tier.reserve(chain("b", 1))
    assert tier.memory.generations[slot] == before + 1


def test_a_corrupt_block_is_found_no_more() -> None:
    """It is counted once; its slot is free when the last reader has left, not before; the right
    bytes may come again meanwhile."""
    tier, tally, events = make_tier(2)
    blocks = chain("a", 1)
    [slot] = put(tier, blocks).slots
    pin = tier.pin(hashes_of(blocks))
    tier.discard(blocks[0].block_hash)
    tier.discard(blocks[0].block_hash)
    assert tier.num_leading(hashes_of(blocks)) == 0
    assert not events.held
    assert tally.count("host", "corrupt") == 1
    again = put(tier, blocks)
    assert again.slots != (slot,)
    tier.unpin(pin)
    tier.check_invariants()
    assert tier.counts().free == 1


def test_a_commit_is_told_after_the_books_are_right() -> None:
    """Whoever hears of a block finds it, and may ask for it."""
    tier, _, _ = make_tier()
    found = []
    tier.on_stored = lambda blocks: found.append(tier.num_leading([b.block_hash for b in blocks]))
    put(tier, chain("a", 2))
    assert found == [2]


class HostMachine(RuleBasedStateMachine):
    """Any order of calls: pinned blocks keep their bytes and generation, listeners know what is
    there, and the states sum to the tier."""

    def __init__(self) -> None:
        super().__init__()
        self.tier, _, self.events = make_tier(7, share=0.5)
        self.fillings: list[Filling] = []
        self.pins: list[tuple[Pin, list[int]]] = []

    @rule(letter=st.sampled_from("ab"), first=st.integers(0, 4), count=st.integers(1, 4))
    def reserve(self, letter: str, first: int, count: int) -> None:
        filling = self.tier.reserve(chain(letter, 8)[first : first + count])
        taken = {slot for other in self.fillings for slot in other.slots}
        taken |= {slot for pin, _ in self.pins for slot in pin.slots}
        assert not taken & set(filling.slots), "a slot was given out twice"
        self.fillings.append(filling)

    @precondition(lambda self: self.fillings)
    @rule(data=st.data(), num_right=st.integers(0, 4))
    def fill(self, data: st.DataObject, num_right: int) -> None:
        filling = self.fillings.pop(data.draw(st.integers(0, len(self.fillings) - 1)))
        places = range(len(filling.slots))
        self.tier.commit(filling.part(places[:num_right]), [*filling.slots[:num_right]])
        self.tier.abort(filling.part(places[num_right:]))

    @rule(letter=st.sampled_from("ab"), count=st.integers(1, 8))
    def pin(self, letter: str, count: int) -> None:
        hashes = hashes_of(chain(letter, count))
        num_leading = self.tier.num_leading(hashes)
        pin = self.tier.pin(hashes)
        assert [block.block_hash for block in pin.blocks] == hashes[:num_leading]
        assert pin.checksums == pin.slots
        self.pins.append((pin, self.tier.memory.generations[list(pin.slots)].tolist()))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin, _ = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.tier.unpin(pin)

    @precondition(lambda self: self.events.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.tier.discard(data.draw(st.sampled_from(sorted(self.events.held))))

    @invariant()
    def books_are_right(self) -> None:
        self.tier.check_invariants()
        for pin, generations in self.pins:
            assert self.tier.memory.generations[list(pin.slots)].tolist() == generations
        counts = self.tier.counts()
        assert counts.free + counts.filling + counts.cached + counts.pinned == 7
        assert counts.filling == sum(len(filling.slots) for filling in self.fillings)
        for block_hash in self.events.held:
            assert self.tier.num_leading([block_hash]) == 1


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
