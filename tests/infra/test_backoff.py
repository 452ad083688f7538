"""The pause before a child is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infra.backoff import FIRST_S, HEALTHY_AFTER_S, LONGEST_S, Backoff


def test_the_pause_doubles_up_to_ten_seconds() -> None:
    """A child that dies at once is tried 8 times within 26 s, then every 10 s."""
    backoff = Backoff()
    pauses = [round(backoff.after(0.0), 3) for _ in range(10)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]


def test_a_child_that_lived_starts_the_count_anew() -> None:
    """30 s alive count as health."""
    backoff = Backoff()
    for _ in range(6):
        backoff.after(1.0)
    assert backoff.after(HEALTHY_AFTER_S) == FIRST_S
    assert backoff.after(1.0) == 2 * FIRST_S


@given(st.lists(st.floats(0, 100)))
def test_the_pause_stays_in_its_bounds(lives: list[float]) -> None:
    """Whatever lives the child had."""
    backoff = Backoff()
    assert all(FIRST_S <= backoff.after(lived) <= LONGEST_S for lived in lives)


def test_an_orderly_end_is_no_failure() -> None:
    """A child that was drained over and over comes back at once each time."""
    backoff = Backoff()
    for _ in range(3):
        backoff.after(1.0)
    assert [backoff.after(1.0, is_clean=True) for _ in range(3)] == [FIRST_S] * 3
