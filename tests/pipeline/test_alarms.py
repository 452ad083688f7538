"""Alarms: one timer for all, and each in its turn."""

from __future__ import annotations

import asyncio

import pytest

from pipeline import alarms as module
from pipeline.alarms import Alarms

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)


async def test_those_that_are_due_ring_once_in_their_order() -> None:
    """However they were set; the others wait on, and then nothing is left."""
    alarms, rung, done = Alarms(), list[str](), asyncio.Event()
    alarms.set(LONG_S, lambda: rung.append("never"))
    alarms.set(0.004, done.set)
    alarms.set(0.002, lambda: rung.append("second"))
    alarms.set(0.0, lambda: rung.append("first"))
    async with asyncio.timeout(LONG_S):
        await done.wait()
    assert rung == ["first", "second"]
    assert len(alarms) == 1


async def test_one_that_is_cancelled_does_not_ring() -> None:
    """Neither when another cancels it that rings at the same moment, nor twice."""
    alarms, rung, done = Alarms(), list[str](), asyncio.Event()
    late = alarms.set(0.0, lambda: rung.append("late"))
    alarms.set(-1.0, late.cancel)
    gone = alarms.set(0.0, lambda: rung.append("gone"))
    gone.cancel()
    gone.cancel()
    alarms.set(0.001, done.set)
    async with asyncio.timeout(LONG_S):
        await done.wait()
    assert (rung, len(alarms)) == ([], 0)


async def test_one_may_set_the_next() -> None:
    """As who watches for silence does."""
    alarms, rung, done = Alarms(), list[int](), asyncio.Event()

    def again() -> None:
        rung.append(len(rung))
        if len(rung) < 3:
            alarms.set(0.0, again)
        else:
            done.set()

    alarms.set(0.0, again)
    async with asyncio.timeout(LONG_S):
        await done.wait()
    assert rung == [0, 1, 2]
    assert len(alarms) == 0


async def test_one_that_fails_keeps_no_other_from_ringing() -> None:
    """The loop is told of it, as for a timer of its own."""
    told: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
    alarms, done = Alarms(), asyncio.Event()

    def fail() -> None:
        raise ValueError("bad ring")

    alarms.set(-1.0, fail)
    alarms.set(0.0, done.set)
    async with asyncio.timeout(LONG_S):
        await done.wait()
    assert told == ["ValueError('bad ring')"]
