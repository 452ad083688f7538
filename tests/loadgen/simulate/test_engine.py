"""The simulated engine against the real one: the same requests, the same costs, two clocks."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loadgen.simulate.truth import Job, Times, run_real, run_virtual

_EXACT = 1e-9


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


def _mean_ttft_s(times: Times, jobs: list[Job]) -> float:
    return fmean(times[str(number)][0] - job.due_s for number, job in enumerate(jobs))


def _end_s(times: Times) -> float:
    return max(some[-1] for some in times.values())


@settings(max_examples=40, deadline=None)
@given(jobs=_jobs(6), batch=st.integers(8, 64), sequences=st.integers(1, 8))
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
