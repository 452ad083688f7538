"""The simulated engine against the real one: the same requests, the same costs, two clocks."""

from __future__ import annotations

from collections import deque
from random import Random
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loadgen.simulate.engine import VirtualEngine
from loadgen.simulate.holdings import EngineSpec
from loadgen.simulate.sequence import Sequence
from tests.loadgen.simulate.truth import (
    BLOCKS_PER_PIECE,
    COSTS,
    Job,
    Times,
    run_real,
    run_virtual,
)
from tests.workers.engine.simulated_engines import BLOCK_SIZE

_EXACT = 1e-9
# The last position of the second prompt is left alone when the third comes, which overtakes.
_LAST_POSITION = [
    Job(due_s=0.0, hash_ids=(), num_prompt=1, num_output=1, overtakes=False),
    Job(due_s=0.4922, hash_ids=(), num_prompt=49, num_output=1, overtakes=False),
    Job(due_s=0.5, hash_ids=(), num_prompt=1, num_output=1, overtakes=True),
]


def _jobs(max_size: int) -> st.SearchStrategy[list[Job]]:
    """Jobs in the order of their time, of few pieces, so that prompts begin alike."""
    job = st.builds(
        Job,
        due_s=st.floats(0, 0.5).map(lambda value: round(value, 4)),
        hash_ids=st.lists(st.integers(0, 2), max_size=4).map(tuple),
        num_prompt=st.integers(1, 70),
        num_output=st.integers(1, 40),
        overtakes=st.booleans(),
    )
    jobs = st.lists(job, min_size=1, max_size=max_size)
    return jobs.map(lambda some: sorted(some, key=lambda one: one.due_s))


def _some_jobs(seed: int, number: int, *, pieces: int) -> list[Job]:
    rng = Random(seed)
    jobs = [
        Job(
            due_s=round(rng.random() * number / 16, 4),
            hash_ids=tuple(rng.randrange(pieces) for _ in range(rng.randrange(4)))
            if pieces
            else (),
            num_prompt=rng.randint(1, 70),
            num_output=rng.randint(1, 40),
            overtakes=rng.random() < 0.2,
        )
        for _ in range(number)
    ]
    return sorted(jobs, key=lambda job: job.due_s)


def small_engine(num_blocks: int) -> VirtualEngine:
    return VirtualEngine(
        EngineSpec(
            costs=COSTS,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            blocks_per_piece=BLOCKS_PER_PIECE,
            max_num_sequences=8,
            max_batch_tokens=48,
        )
    )


def a_sequence(age: int, *, num_prompt: int, num_output: int) -> Sequence:
    return Sequence(
        key=str(age),
        age=age,
        pieces=(b"prompt %d" % age,),
        num_prompt=num_prompt,
        num_output=num_output,
        holds=False,
    )


def _mean_ttft_s(times: Times, jobs: list[Job]) -> float:
    return fmean(times[str(number)][0] - job.due_s for number, job in enumerate(jobs))


def _end_s(times: Times) -> float:
    return max(some[-1] for some in times.values())


@settings(max_examples=40, deadline=None)
@given(jobs=_jobs(6), batch=st.integers(8, 64), sequences=st.integers(1, 8))
@example(jobs=_LAST_POSITION, batch=48, sequences=2)
def test_tokens_come_when_the_real_engine_brings_them(
    jobs: list[Job], batch: int, sequences: int
) -> None:
    """With room for all, every token comes at the very time of the real scheduler with the same
    costs, prompts that begin alike and chunks included, and as much is found in the cache."""
    batch = max(batch, sequences)
    real, real_cached = run_real(jobs, 1000, batch, sequences)
    virtual, cached, engine = run_virtual(jobs, 1000, batch, sequences)
    assert virtual.keys() == real.keys()
    for key, times in real.items():
        assert virtual[key] == pytest.approx(times, rel=_EXACT, abs=_EXACT), key
    assert cached == real_cached
    assert engine.num_preemptions == 0


def test_a_pool_that_is_too_small_delays_as_the_real_one_does() -> None:
    """Where sequences are preempted and computed again, a run ends within 4 % of the real one's
    time, and within 1 % on average: blocks of answers are found again only by the real one, and
    cached blocks go by the piece here."""
    ends, num_preempted = [], 0
    for seed in range(16):
        jobs = _some_jobs(seed, 8, pieces=0)
        real, _ = run_real(jobs, 40, 48, 8)
        virtual, _, engine = run_virtual(jobs, 40, 48, 8)
        assert {key: len(some) for key, some in virtual.items()} == {
            key: len(some) for key, some in real.items()
        }
        ends.append(_end_s(virtual) / _end_s(real))
        num_preempted += engine.num_preemptions
    assert num_preempted > 5, "nothing was tried"
    assert ends == pytest.approx([1.0] * len(ends), abs=0.04)
    assert fmean(ends) == pytest.approx(1.0, abs=0.01)


def test_a_full_cache_serves_as_the_real_one_does() -> None:
    """Where cached pieces go for want of room, the share that is found is within five points of
    the real pool's, and the mean time to the first token within 10 %."""
    found, firsts = [], []
    for seed in range(6):
        jobs = _some_jobs(seed, 48, pieces=3)
        real, real_cached = run_real(jobs, 90, 48, 4)
        virtual, cached, _ = run_virtual(jobs, 90, 48, 4)
        tokens = sum(job.num_prompt for job in jobs)
        found.append((sum(cached.values()) - sum(real_cached.values())) / tokens)
        firsts.append(_mean_ttft_s(virtual, jobs) / _mean_ttft_s(real, jobs))
        assert sum(real_cached.values()) > 0.05 * tokens, "nothing was found"
    assert fmean(found) == pytest.approx(0.0, abs=0.05)
    assert fmean(firsts) == pytest.approx(1.0, abs=0.1)


def test_kv_that_keeps_arriving_does_not_starve_who_was_preempted() -> None:
    """As in the real engine: a preempted sequence gets the blocks that come free, however often KV
    from outside asks for them first; some of that arrives all the same."""
    engine = small_engine(num_blocks=12)
    for age in range(2):
        engine.enqueue(a_sequence(age, num_prompt=11, num_output=30))
    now_s, ends, arrivals = 0.0, {}, deque[tuple[int, int]]()
    for step in range(300):
        if engine.reserve(BLOCK_SIZE):
            arrivals.append((step + 16, 2 + step))
        while arrivals and arrivals[0][0] <= step:
            _, age = arrivals.popleft()
            arrived = a_sequence(age, num_prompt=BLOCK_SIZE, num_output=3)
            arrived.num_tokens += 1
            engine.adopt(arrived, BLOCK_SIZE)
        if engine.start(now_s) is not None:
            now_s = engine.cut(now_s + 1e-6)  # a step, not the whole run
            ends |= {sequence.age: step for sequence in engine.finish().ended}
        engine.check_invariants()
    assert engine.num_preemptions > 0, "nothing was tried"
    assert ends[0] < 40, ends
    assert ends[1] < 80, ends
    assert len(ends) > 10, ends


def test_a_run_that_is_cut_as_it_begins_takes_no_blocks() -> None:
    """Who comes at the very moment at which a run begins is there before its first step: what that
    had got for its tokens goes back."""
    engine = small_engine(num_blocks=12)
    engine.enqueue(a_sequence(0, num_prompt=BLOCK_SIZE, num_output=9))
    now_s = engine.start(0.0)
    assert now_s is not None
    engine.finish()
    num_free = engine.pool.num_available
    engine.start(now_s)
    assert engine.pool.num_available == num_free - 1, "a token of a new block"
    assert engine.cut(now_s) == now_s
    engine.finish()
    engine.check_invariants()
    assert engine.pool.num_available == num_free
