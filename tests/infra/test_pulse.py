"""Periods that begin together."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from infra.pulse import next_pulse, until_next_s

PERIODS = st.sampled_from([0.0125, 0.05, 0.125, 0.25, 0.5, 1.0, 5 / 3])
MOMENTS = st.floats(0.0, 1e7)


@given(PERIODS, MOMENTS)
def test_the_wait_ends_at_a_multiple_of_the_period(period_s: float, now_s: float) -> None:
    """And takes no longer than a period and what a timer may be early, nor next to nothing."""
    left_s = until_next_s(period_s, now_s)
    assert period_s / 32 <= left_s <= period_s * 33 / 32
    num_periods = (now_s + left_s) / period_s
    assert abs(num_periods - round(num_periods)) < 1e-3


@given(PERIODS, MOMENTS, st.floats(0.0, 0.9))
def test_who_begins_at_different_moments_goes_on_together(
    period_s: float, now_s: float, share: float
) -> None:
    """Two that began within one period end their waits at the same moments from then on."""
    first_s, second_s = now_s, now_s + share * period_s
    for _ in range(2):
        first_s += until_next_s(period_s, first_s)
        second_s += until_next_s(period_s, second_s)
    apart = abs(first_s - second_s) / period_s
    assert abs(apart - round(apart)) < 1e-3


@given(PERIODS, st.integers(0, 10**6), st.floats(0.0, 1 / 33))
def test_a_timer_that_fires_early_does_not_fire_twice(
    period_s: float, number: int, share: float
) -> None:
    """What wakes a little before its moment waits for the next one, not for the rest of this."""
    woken_s = (number + 1) * period_s - share * period_s
    assert until_next_s(period_s, woken_s) > 0.9 * period_s


async def test_next_pulse_returns_at_the_beginning_of_a_period() -> None:
    """The loop's clock has passed a multiple that lay ahead."""
    loop = asyncio.get_running_loop()
    before = loop.time() // 0.02
    await next_pulse(0.02)
    assert (loop.time() + 0.001) // 0.02 > before
