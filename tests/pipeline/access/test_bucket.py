"""A limit per minute: never exceeded, given back, and honest about when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.access.bucket import Bucket

limits = st.integers(1, 10**9)
steps = st.lists(
    st.tuples(st.floats(0, 120), st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=60
)
ROUNDING = 1e-3


@given(limits, steps)
def test_no_span_of_time_gets_more_than_the_limit(
    limit: int, steps: list[tuple[float, int, float]]
) -> None:
    """Between any two moments T seconds apart, charges less refunds are at most
    limit * (1 + T / 60)."""
    bucket, now_s = Bucket(at_s=50.0), 50.0
    changes: list[tuple[float, float]] = []
    for passed_s, amount, given_back in steps:
        now_s += passed_s
        bucket.drain(limit, now_s)
        if bucket.fits(amount, limit):
            bucket.charge(amount)
            back = int(amount * given_back)
            before = bucket.level
            bucket.charge(-back)
            changes.append((now_s, amount - (before - bucket.level)))
        bucket.check_invariants()
    for first, (start_s, _) in enumerate(changes):
        total = 0.0
        for at_s, change in changes[first:]:
            total += change
            assert total <= limit * (1 + (at_s - start_s) / 60) * (1 + 1e-9) + ROUNDING


@given(limits, st.integers(1, 10**9), st.floats(0, 2))
def test_the_wait_is_long_enough_and_no_longer(limit: int, amount: int, fill: float) -> None:
    """After the announced time the charge fits; a little before it does not."""
    bucket = Bucket(level=fill * limit, at_s=0.0)
    wait_s = bucket.wait_s(amount, limit)
    assert (wait_s is None) == (amount > limit)
    if wait_s is None:
        return
    assert bucket.fits(amount, limit) or wait_s > 0
    early = Bucket(bucket.level, 0.0)
    early.drain(limit, wait_s * 0.9)
    if wait_s > 1:
        assert not early.fits(amount, limit) or wait_s * limit / 60 * 0.1 < 1e-5
    bucket.drain(limit, wait_s + 0.001)  # what a client is told is rounded up to milliseconds
    assert bucket.fits(amount, limit)


@given(limits, st.floats(0, 3))
def test_after_the_reset_time_the_whole_limit_is_there(limit: int, fill: float) -> None:
    """Also when more was used than the limit allows."""
    bucket = Bucket(level=fill * limit, at_s=0.0)
    bucket.drain(limit, bucket.reset_s(limit) + 0.001)
    assert bucket.remaining(limit) == limit


def test_an_idle_key_has_a_minutes_worth_at_once_and_then_a_steady_rate() -> None:
    """60 per minute: 60 now, then one per second."""
    bucket = Bucket(at_s=1000.0)
    for _ in range(60):
        assert bucket.fits(1, 60)
        bucket.charge(1)
    assert not bucket.fits(1, 60)
    assert bucket.wait_s(1, 60) == 1.0
    assert (bucket.remaining(60), bucket.reset_s(60)) == (0, 60.0)
    bucket.drain(60, 1001.0)
    assert bucket.fits(1, 60)
    assert not bucket.fits(2, 60)


def test_a_clock_behind_the_last_change_drains_nothing() -> None:
    """Another process may have written a moment later than this one looked at the clock."""
    bucket = Bucket(level=5.0, at_s=100.0)
    bucket.drain(60, 99.0)
    assert (bucket.level, bucket.at_s) == (5.0, 100.0)


def test_what_is_owed_holds_later_charges_back() -> None:
    """Use beyond the limit is paid by waiting."""
    bucket = Bucket(level=0.0, at_s=0.0)
    bucket.charge(150)
    assert bucket.remaining(100) == 0
    assert bucket.wait_s(50, 100) == 60.0
