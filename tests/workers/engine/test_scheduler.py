from __future__ import annotations

import pytest

from schemas.errors import ConfigError
from schemas.requests import SamplingParams
from tests.workers.engine.test_block_pool import CountedSlots
from workers.engine.block_pool import BlockPool
from workers.engine.line import HEAD_START, place_in_line
from workers.engine.scheduler import EngineConfig, Scheduler
from workers.engine.sequence import ROOT, Group, Sequence

SIZE = 4


class Bench:
    """A scheduler whose sequences are named by their order of arrival; nothing is computed."""

    def __init__(self, num_blocks: int, *, max_batch_tokens: int = 16, most: int = 8) -> None:
        self.pool = BlockPool(CountedSlots(num_blocks), SIZE)
        config = EngineConfig(max_batch_tokens=max_batch_tokens, max_num_sequences=most)
        self.scheduler = Scheduler(self.pool, config)
        self.num_arrived = 0

    def add(
        self, num_tokens: int, first_id: int | None = None, *, overtakes: bool = False
    ) -> Sequence:
        number = self.num_arrived
        self.num_arrived += 1
        group = Group(
            key=str(number),
            place=place_in_line(number, overtakes=overtakes),
            sampling=SamplingParams(),
            salt=b"",
            overtakes=overtakes,
        )
        first = 100 * number if first_id is None else first_id
        ids = list(range(first, first + num_tokens))
        sequence = Sequence(group=group, index=0, token_ids=ids, num_prompt_tokens=num_tokens)
        self.scheduler.enqueue(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """One step, in which token 7 is sampled for whoever samples; tokens computed by name."""
        batch = self.scheduler.schedule().batch
        counts = {sequence.group.key: sequence.count for sequence in batch}
        self.scheduler.complete(batch)
        for sequence in batch:
            if sequence.sample:
                sequence.token_ids.append(7)
        self.pool.check_invariants()
        return counts


def test_decodes_come_first_and_chunks_share_the_rest() -> None:
    """Every decoding sequence gets its token before any prompt gets a chunk of what is left."""
    bench = Bench(32, max_batch_tokens=8)
    bench.add(3)
    bench.add(2)
    assert bench.step() == {"0": 3, "1": 2}
    bench.add(20)
    assert list(bench.step().items()) == [("0", 1), ("1", 1), ("2", 6)]
    bench.add(5)
    assert bench.step() == {"0": 1, "1": 1, "2": 6}
    assert bench.step() == {"0": 1, "1": 1, "2": 6}
    assert bench.step() == {"0": 1, "1": 1, "2": 2, "3": 4}


def test_nobody_overtakes_the_head_of_the_line() -> None:
    """A long request that waits for room is not starved by short ones behind it."""
    bench = Bench(6)
    running = bench.add(12)
    bench.step()
    bench.add(14)
    bench.add(1)
    assert bench.step() == {"0": 1}
    assert len(bench.scheduler.waiting) == 2
    bench.scheduler.remove(running)
    assert bench.step() == {"1": 14, "2": 1}


def test_who_overtakes_goes_before_prompts_of_others_and_ends_its_step() -> None:
    """It starts before who waits and before a prompt that is half computed, and the step that ends
    its prompt takes nobody behind it along."""
    bench = Bench(32, max_batch_tokens=8)
    bench.add(20)
    assert bench.step() == {"0": 8}
    bench.add(5)
    bench.add(10, overtakes=True)
    assert bench.step() == {"2": 8}
    assert bench.step() == {"2": 2}
    assert list(bench.step().items()) == [("2", 1), ("0", 7)]
    assert list(bench.step().items()) == [("2", 1), ("0", 5), ("1", 2)]


def test_of_those_that_overtake_who_came_first_goes_first() -> None:
    """They take turns as all others do, so none of them makes another one later."""
    bench = Bench(32, max_batch_tokens=8)
    bench.add(5)
    bench.add(5, overtakes=True)
    bench.add(5, overtakes=True)
    assert [bench.step() for _ in range(2)] == [{"1": 5}, {"1": 1, "2": 5}]


def test_who_overtakes_leaves_a_prompt_the_room_that_it_was_promised() -> None:
    """Where there is not room for both it waits: what is half computed is not computed again."""
    bench = Bench(6, max_batch_tokens=8)
    bench.add(20)
    bench.step()
    bench.add(8, overtakes=True)
    assert [bench.step() for _ in range(2)] == [{"0": 8}, {"0": 4}]
    assert bench.scheduler.num_preemptions == 0


def test_a_request_is_overtaken_by_few() -> None:
    """Places never meet; who overtakes stands before the last ones that came, and before no more:
    everybody else goes in the order in which they came."""
    places = {
        (number, overtakes): place_in_line(number, overtakes=overtakes)
        for number in range(2 * HEAD_START)
        for overtakes in (False, True)
    }
    assert len(set(places.values())) == len(places)
    for number in range(2 * HEAD_START):
        before = [
            other for other in range(2 * HEAD_START) if places[other, True] < places[number, False]
        ]
        assert before == list(range(min(2 * HEAD_START, number + HEAD_START + 1)))


def test_the_number_of_sequences_is_bounded() -> None:
    """No more than max_num_sequences run, however much room there is."""
    bench = Bench(32, most=2)
    for _ in range(3):
        bench.add(2)
    assert bench.step() == {"0": 2, "1": 2}


def test_room_promised_to_a_running_prompt_is_known() -> None:
    """A prompt in chunks has not taken all its blocks yet; reservations must leave them alone."""
    bench = Bench(5, max_batch_tokens=8)
    bench.add(16)
    bench.step()
    assert bench.pool.num_available == 3
    assert bench.scheduler.num_promised() == 2


def test_room_owed_to_who_was_preempted_and_who_is_next_is_known() -> None:
    """KV from outside must leave alone what a preempted sequence needs to go on and what the first
    in line needs to start, but not what others further back need."""
    bench = Bench(6)
    bench.add(7)
    bench.add(7)
    for _ in range(3):
        bench.step()
    assert [one.group.key for one in bench.scheduler.running] == ["0", "1"]
    bench.add(11)
    bench.add(3)
    assert bench.scheduler.num_owed() == 3, "who is next"
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    young = bench.scheduler.waiting[0]
    assert (young.group.key, len(young.token_ids)) == ("1", 13)
    assert bench.scheduler.num_owed() == 4, "who was preempted, and is next now"
    bench.scheduler.enqueue(bench.scheduler.waiting.pop(1))
    bench.scheduler.waiting[-1].group.has_started = True
    assert bench.scheduler.num_owed() == 5, "whoever had begun, wherever it stands"


def test_what_a_fork_shares_is_not_owed_to_it() -> None:
    """Choices of a root that is computed need no room for the prompt's full blocks."""
    bench = Bench(16)
    group = Group(key="a", place=0, sampling=SamplingParams(), salt=b"", num_unstarted=2)
    root = Sequence(group=group, index=ROOT, token_ids=list(range(9)), num_prompt_tokens=9)
    choices = [
        Sequence(group=group, index=index, token_ids=list(range(9)), num_prompt_tokens=9)
        for index in range(2)
    ]
    group.root, group.pending = root, list(choices)
    bench.scheduler.enqueue(root)
    bench.step()
    assert bench.scheduler.waiting == choices
    assert bench.scheduler.num_owed() == 2


def test_the_youngest_makes_room_and_keeps_its_tokens() -> None:
    """Out of blocks, the youngest is preempted; it computes again later, from its old place."""
    bench = Bench(4)
    bench.add(7)
    young = bench.add(7)
    bench.step()
    assert bench.step() == {"0": 1, "1": 1}
    tokens = list(young.token_ids)
    assert bench.step() == {"0": 1}
    assert young.block_table == []
    assert young.num_computed_tokens == 0
    assert young.token_ids == tokens
    bench.add(1)
    assert bench.scheduler.waiting[0] is young
    assert bench.scheduler.num_preemptions == 1


def test_preempted_sequence_finds_its_blocks_in_the_cache() -> None:
    """What was computed stays findable: only what was evicted is computed again."""
    bench = Bench(5)
    old = bench.add(8)
    young = bench.add(8)
    bench.step()
    assert bench.step() == {"0": 1}
    assert young.block_table == []
    bench.scheduler.remove(old)
    assert bench.step() == {"1": 1}
    assert young.group.num_cached_tokens == 0  # its own work is no hit


def test_older_chunk_takes_blocks_of_a_decode_that_was_planned_already() -> None:
    """Decodes are planned first, but age decides: the younger one leaves the step again."""
    bench = Bench(3)
    old = bench.add(3)
    young = bench.add(6)
    bench.step()
    old.token_ids += [1, 2, 3]  # more to compute than a decode has
    assert bench.step() == {"0": 4}
    assert young.block_table == []
    assert bench.scheduler.waiting == [young]


def test_prefix_is_shared_but_the_last_token_is_always_computed() -> None:
    """A prompt that is cached as a whole still computes its last block: it needs the logits."""
    bench = Bench(16)
    first = bench.add(8, first_id=0)
    bench.step()
    twin = bench.add(8, first_id=0)
    assert bench.step() == {"0": 1, "1": 4}
    assert twin.block_table[0] == first.block_table[0]
    assert twin.block_table[1] != first.block_table[1]
    assert twin.group.num_cached_tokens == 4


def test_a_fork_begins_where_most_is_known() -> None:
    """The cache may know more than a root that was evicted and is only half computed again."""
    bench = Bench(16, max_batch_tokens=8)
    cached = bench.add(12, first_id=0)
    bench.step()
    bench.step()
    bench.scheduler.remove(cached)
    choice = bench.add(12, first_id=0)
    root = Sequence(
        group=choice.group,
        index=ROOT,
        token_ids=list(choice.token_ids),
        num_prompt_tokens=12,
        block_table=bench.pool.allocate(1) or [],
        num_computed_tokens=4,
    )
    choice.group.root = root
    choice.group.keeps_root = True
    assert bench.step() == {"1": 4}


def test_generated_tokens_are_shared_too() -> None:
    """A follow-up prompt that contains an earlier answer finds its blocks."""
    bench = Bench(16)
    first = bench.add(4)
    for _ in range(6):
        bench.step()
    ids = list(first.token_ids)
    bench.scheduler.remove(first)
    follow_up = bench.add(1)
    follow_up.token_ids[:] = [*ids, 1, 2]
    assert bench.step() == {"1": len(ids) + 2 - 8}


def test_nothing_to_run_is_an_empty_step() -> None:
    """When pinned blocks leave no room, the step is empty, and works again after a release."""
    bench = Bench(2)
    pinned = bench.pool.allocate(2) or []
    bench.add(3)
    assert bench.step() == {}
    bench.pool.release(pinned)
    assert bench.step() == {"0": 3}


@pytest.mark.parametrize(
    ("max_batch_tokens", "max_num_sequences", "param"),
    [(4, 0, "max_num_sequences"), (4, 5, "max_batch_tokens")],
)
def test_impossible_bounds_are_refused(
    max_batch_tokens: int, max_num_sequences: int, param: str
) -> None:
    """Every running sequence must get its token in each step; the error names the key."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_batch_tokens=max_batch_tokens, max_num_sequences=max_num_sequences)
    assert caught.value.param == param
