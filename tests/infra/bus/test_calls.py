"""Questions that wait for their answer: each ends once, with it, or when its time is over."""

from __future__ import annotations

import asyncio

import pytest

from infra.bus.calls import PendingCalls
from infra.bus.wire import Msg
from schemas.errors import BusUnavailable


def late() -> BusUnavailable:
    return BusUnavailable("too late")


async def test_each_fails_when_its_own_time_is_over() -> None:
    """A short question after a long one does not wait for that one's time, and a long one that is
    looked at with it goes on; then the next shortest's time comes."""
    calls = PendingCalls("inbox")
    long, is_long = calls.begin("a", 60.0, late)
    _, is_second = calls.begin("b", 0.1, late)
    _, is_first = calls.begin("c", 0.01, late)
    async with asyncio.timeout(30):
        with pytest.raises(BusUnavailable):
            await is_first
        assert not is_long.done()
        with pytest.raises(BusUnavailable):
            await is_second
    answer = Msg(long, "", b"yes")
    calls.answer(answer)
    assert await is_long is answer


async def test_an_answer_after_the_end_is_dropped() -> None:
    """Of a question that was given up nothing is left, and its time means nothing to others."""
    calls = PendingCalls("inbox")
    reply, future = calls.begin("a", 0.01, late)
    calls.end(reply)
    calls.answer(Msg(reply, "", b"yes"))
    assert future.cancelled()
    assert len(calls) == 0
    _, other = calls.begin("b", 0.02, late)
    async with asyncio.timeout(30):
        with pytest.raises(BusUnavailable):
            await other


async def test_all_fail_when_the_connection_breaks() -> None:
    """At once, whatever time they had left."""
    calls = PendingCalls("inbox")
    futures = [calls.begin("a", seconds, late)[1] for seconds in (0.01, 60.0)]
    calls.fail_all(BusUnavailable("broke"))
    for future in futures:
        with pytest.raises(BusUnavailable, match="broke"):
            await future
