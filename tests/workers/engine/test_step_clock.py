from __future__ import annotations

import pytest

from workers.engine import simulated
from workers.engine.simulated import StepClock


class SlackTime:
    """Stands in for ``time``: whoever sleeps wakes late."""

    def __init__(self, late_s: float) -> None:
        self.now_s = 100.0
        self.late_s = late_s
        self.num_sleeps = 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.num_sleeps += 1
        self.now_s += seconds + self.late_s


def took(at: SlackTime, steps: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of ``steps`` in a row, each with what it should take and what computing it does."""
    monkeypatch.setattr(simulated, "time", at)
    clock = StepClock()
    began_s = at.now_s
    for step_s, computing_s in steps:
        end_s = clock.begin() + step_s
        at.now_s += computing_s
        clock.end(end_s)
    return at.now_s - began_s


@pytest.mark.parametrize("late_s", [0.0, 5e-6, 45e-6])
@pytest.mark.parametrize("step_s", [30e-6, 48e-6, 200e-6])
def test_steps_in_a_row_take_what_they_should(
    late_s: float, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late timers are, as far as the system's slack goes: only the last wait may be late,
    for the one before it was made up for."""
    at = SlackTime(late_s)
    seconds = took(at, [(step_s, 10e-6)] * 1000, monkeypatch)
    assert 1000 * step_s - 1e-9 <= seconds <= 1000 * step_s + late_s + 1e-9


def test_what_a_busy_machine_took_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeper that wakes a millisecond late was kept from the processor: the steps after it go
    at their own pace, but for the slack that any timer has."""
    at = SlackTime(1e-3)
    seconds = took(at, [(200e-6, 0.0)] * 100, monkeypatch)
    assert seconds == pytest.approx(100 * (200e-6 + 1e-3) - 99 * 50e-6)


def test_a_step_that_computes_longer_than_it_should_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is what computing took, and those after it don't hurry for it."""
    at = SlackTime(0.0)
    assert took(at, [(50e-6, 80e-6), (50e-6, 20e-6)], monkeypatch) == pytest.approx(130e-6)
    assert at.num_sleeps == 1
