"""Periods that begin together.

A process at rest pays for being woken more than for what it then does. So whatever is done once per
period is done at the multiples of that period on the monotonic clock, which all processes of a host
share: beats, looks and pulls fall on the same moments, and one waking serves them all.
"""

from __future__ import annotations

import asyncio
import contextlib

_EARLY = 1 / 32  # of a period: a timer that fires so much before its moment has fired for it


def until_next_s(period_s: float, now_s: float) -> float:
    """Seconds from ``now_s``, of the loop's clock, to the next beginning of a period.

    From 1/32 to 33/32 of a period: what is done in the last moment of one is done for the next.
    """
    left_s = period_s - now_s % period_s
    return left_s if left_s >= period_s * _EARLY else left_s + period_s


async def next_pulse(period_s: float) -> None:
    """Sleep until the next beginning of a period."""
    await asyncio.sleep(until_next_s(period_s, asyncio.get_running_loop().time()))


async def set_or_pulse(event: asyncio.Event, period_s: float) -> None:
    """Wait until ``event`` is set, which it is not afterwards, or for the next period."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(until_next_s(period_s, asyncio.get_running_loop().time())):
            await event.wait()
    event.clear()
