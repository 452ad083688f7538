"""One timer for all who wait in silence."""

from __future__ import annotations

import asyncio

import pytest

from pipeline import quiet
from pipeline.quiet import QuietWatch


class Loop:
    """A clock that is turned by hand, and its timers."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, object]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, callback: object) -> object:
        self.timers.append((when_s, callback))
        return self.timers[-1]

    def turn_to(self, now_s: float) -> None:
        while self.timers and (due := min(self.timers, key=lambda one: one[0]))[0] <= now_s:
            self.timers.remove(due)
            self.now_s = max(self.now_s, due[0])
            due[1]()  # type: ignore[operator]
        self.now_s = now_s


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_who_hears_something_and_waits_on_waits_from_then(loop: Loop) -> None:
    """Its silence begins anew, behind those who have waited longer; who did not wait is not
    entered by it."""
    asked: list[float] = []
    watch = QuietWatch(lambda: asked.append(loop.now_s), loop)  # type: ignore[arg-type]
    watch.begin("a")
    loop.turn_to(100.5)
    watch.begin("b")
    loop.turn_to(100.8)
    watch.again("a")
    watch.again("c")
    assert len(watch) == 2
    loop.turn_to(101.4)
    assert asked == []
    loop.turn_to(101.5)
    assert asked == [101.5]


def test_one_who_waits_in_silence_has_it_asked_once_a_second(loop: Loop) -> None:
    """Not before a second of silence, and again while the silence lasts."""
    asked: list[float] = []
    watch = QuietWatch(lambda: asked.append(loop.now_s), loop)  # type: ignore[arg-type]
    watch.begin("a")
    loop.turn_to(100.9)
    assert asked == []
    loop.turn_to(103.5)
    assert asked == [101.0, 102.0, 103.0]


def test_who_hears_something_begins_anew(loop: Loop) -> None:
    """A stream that flows never asks, though it waits most of the time."""
    asked: list[float] = []
    watch = QuietWatch(lambda: asked.append(loop.now_s), loop)  # type: ignore[arg-type]
    for step in range(50):
        watch.begin("flows")
        loop.turn_to(100.0 + 0.2 * (step + 1))
        watch.end("flows")
    assert asked == []


def test_thousands_share_one_timer_and_one_question(loop: Loop) -> None:
    """And when nobody waits any more there is no timer at all."""
    asked: list[float] = []
    watch = QuietWatch(lambda: asked.append(loop.now_s), loop)  # type: ignore[arg-type]
    for number in range(10_000):
        watch.begin(number)
    assert len(loop.timers) == 1
    loop.turn_to(101.5)
    assert asked == [101.0]
    for number in range(10_000):
        watch.end(number)
    loop.turn_to(110.0)
    assert (asked, loop.timers, len(watch)) == ([101.0], [], 0)


def test_one_silent_among_many_that_flow_is_noticed(loop: Loop) -> None:
    """Whoever waits longest counts, whatever the others hear."""
    asked: list[float] = []
    watch = QuietWatch(lambda: asked.append(loop.now_s), loop)  # type: ignore[arg-type]
    watch.begin("silent")
    for step in range(10):
        watch.begin("flows")
        loop.turn_to(100.0 + 0.25 * (step + 1))
        watch.end("flows")
    assert asked == [101.0, 102.0]


async def test_it_runs_on_a_real_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is the loop's own."""
    monkeypatch.setattr(quiet, "QUIET_S", 0.01)
    asked = asyncio.Event()
    watch = QuietWatch(asked.set, asyncio.get_running_loop())
    watch.begin("a")
    async with asyncio.timeout(30):
        await asked.wait()
    watch.end("a")
