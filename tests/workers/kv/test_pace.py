"""Speeds as they were seen to be: of computing any length, of copies, and which is faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kv.pace import Pace, PrefillSpeed


def contexts(start: int, end: int) -> int:
    return sum(range(start, end))


@pytest.mark.parametrize(("token_s", "context_s"), [(1e-3, 0.0), (1e-4, 1e-7), (2e-3, 3e-6)])
def test_computing_is_learned_for_any_length(token_s: float, context_s: float) -> None:
    """What each token costs, and what each token before it adds, are told apart by steps that
    come early and late in prompts."""
    speed = PrefillSpeed()
    for start, end in [(0, 512), (512, 1024), (0, 100), (3584, 4096)] * 40:
        seconds = token_s * (end - start) + context_s * contexts(start, end)
        speed.observe([(start, end)], seconds)
    for start, end in [(0, 100), (1000, 1032), (0, 8000)]:
        expected = token_s * (end - start) + context_s * contexts(start, end)
        assert speed.seconds(start, end) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("before_s", "now_s"), [(1e-5, 1e-3), (1e-3, 1e-5)])
def test_new_measurements_count_more_than_old_ones(before_s: float, now_s: float) -> None:
    """A machine that got slower, or faster, is believed after some steps."""
    speed = PrefillSpeed(before_s)
    for per_token_s in (before_s, now_s):
        for _ in range(80):
            speed.observe([(0, 256)], 256 * per_token_s)
    assert speed.seconds(0, 1000) == pytest.approx(1000 * now_s, rel=0.05)


def test_nothing_is_learned_from_a_few_tokens() -> None:
    """What a step costs whatever it computes is not what its tokens cost."""
    speed = PrefillSpeed(1e-4)
    speed.observe([(0, 20)], 1.0)
    speed.observe([], 1.0)
    assert not speed.is_measured
    assert speed.seconds(0, 10) == pytest.approx(1e-3)


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(32, 5000), st.floats(0, 1e6, allow_nan=False))
    )
)
def test_no_measurement_makes_the_speed_absurd(seen: list[tuple[int, int, float]]) -> None:
    """Whatever is observed: more positions never take less time, and none take none."""
    speed = PrefillSpeed()
    for start, count, seconds in seen:
        speed.observe([(start, start + count)], seconds)
    times = [speed.seconds(0, end) for end in (0, 1, 16, 1000, 100_000)]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_copying_is_tried_until_both_were_measured_and_then_the_faster_is_taken() -> None:
    """One that was never measured can't be told from the other: trying measures it."""
    pace = Pace()
    assert pace.is_copying_faster(1000, 1)
    pace.promotion.note(10, 0.01)
    assert pace.is_copying_faster(1000, 1)
    for _ in range(81):
        pace.prefill.observe([(0, 100)], 0.1)
    assert pace.is_copying_faster(10, 100)
    assert not pace.is_copying_faster(200, 100)
