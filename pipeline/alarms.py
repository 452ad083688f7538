"""Timers that hardly ever ring, in place of the loop's own.

A request is under several bounds (admission's word, silence, its deadline), and nearly always comes
to its end within all of them. A timer of the loop costs most when it is set and ended; here that is
an entry in a set, and the loop has one timer for all, which looks every ``TICK_S`` for those that
are due. So none rings early, and each up to ``TICK_S`` late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.1  # to look at ten thousand takes half a millisecond

Ring = Callable[[], None]


def _nothing() -> None: ...


class Alarm:
    """Rings once, unless it is cancelled first."""

    __slots__ = ("_alarms", "_ring", "due_s")

    def __init__(self, due_s: float, ring: Ring, alarms: set[Alarm]) -> None:
        self.due_s = due_s
        self._ring = ring
        self._alarms = alarms

    def call(self) -> None:
        """Ring."""
        self._ring()

    def cancel(self) -> None:
        """Never ring; without effect when it has rung. Whoever it would have called is let go."""
        self._alarms.discard(self)
        self._ring = _nothing


class Alarms:
    """The alarms of one event loop."""

    def __init__(self) -> None:
        self._alarms: set[Alarm] = set()
        self._is_ticking = False

    def __len__(self) -> int:
        return len(self._alarms)

    def set(self, delay_s: float, ring: Ring) -> Alarm:
        """Call ``ring`` in ``delay_s``, or up to ``TICK_S`` later; it returns at once."""
        alarm = Alarm(time.monotonic() + delay_s, ring, self._alarms)
        self._alarms.add(alarm)
        if not self._is_ticking:
            self._tick_later()
        return alarm

    def _tick_later(self) -> None:
        self._is_ticking = True
        asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        now_s = time.monotonic()
        due = [alarm for alarm in self._alarms if alarm.due_s <= now_s]
        loop = asyncio.get_running_loop()
        for alarm in sorted(due, key=lambda alarm: alarm.due_s):
            self._alarms.discard(alarm)
            loop.call_soon(alarm.call)  # by itself, so that one that fails keeps no other from it
        if self._alarms:
            self._tick_later()
