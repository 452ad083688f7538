"""Questions that wait for their answer: each ends once, with it, or when its time is over."""

from __future__ import annotations

import asyncio

import pytest

from infra.bus.calls import Call, PendingCalls
from infra.bus.wire import Msg
from schemas.errors import BusUnavailable


def late(_: Call) -> BusUnavailable:
    return BusUnavailable("too late")


async def test_each_fails_when_its_own_time_is_over() -> None:
    """A short question after a long one does not wait for that one's time, and a long one that is
    looked at with it goes on; then the next shortest's time comes."""
    calls = PendingCalls("inbox", late)
    long, second, first = (
        calls.begin(name, seconds) for name, seconds in (("a", 60.0), ("b", 0.1), ("c", 0.01))
    )
    async with asyncio.timeout(30):
        with pytest.raises(BusUnavailable):
            await first.future
        assert not long.future.done()
        with pytest.raises(BusUnavailable):
            await second.future
    answer = Msg(long.reply, "", b"yes")
    calls.answer(answer)
    assert await long.future is answer


async def test_an_answer_after_the_end_is_dropped() -> None:
    """Of a question that was given up nothing is left, and its time means nothing to others."""
    calls = PendingCalls("inbox", late)
    call = calls.begin("a", 0.01)
    calls.give_up(call)
    calls.answer(Msg(call.reply, "", b"yes"))
    assert call.future.cancelled()
    assert len(calls) == 0
    other = calls.begin("b", 0.02)
    async with asyncio.timeout(30):
        with pytest.raises(BusUnavailable):
            await other.future


async def test_all_fail_when_the_connection_breaks() -> None:
    """At once, whatever time they had left."""
    calls = PendingCalls("inbox", late)
    futures = [calls.begin("a", seconds).future for seconds in (0.01, 60.0)]
    calls.fail_all(BusUnavailable("broke"))
    for future in futures:
        with pytest.raises(BusUnavailable, match="broke"):
            await future
