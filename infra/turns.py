"""Work that comes in a heap, taken in small portions.

All that a read from a socket sets going would else run in one turn of the event loop, and nothing
of it leaves before the turn ends: of 64 requests that come together the first would wait for the
work on the last. Let through a few at a time, the first is with the next process while the second
is worked on::

    turn     | 1 2 3 4 |io| 5 6 7 8 |io| 9 …      io: what was said leaves, answers come in
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets ``per_turn`` through in each turn of the loop, in the order in which they came."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._num = 0  # let through in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_called = 0  # of those who waited: they run in the turn after the call
        self._is_queued = False  # somebody waits, or was called and runs in this turn or the next
        self._is_turn_known = False

    async def enter(self) -> None:
        """Wait for a turn that has room."""
        loop = asyncio.get_running_loop()
        if not self._is_turn_known:
            self._is_turn_known = True
            loop.call_soon(self._next_turn)
        if self._num < self._per_turn and not self._is_queued:
            self._num += 1
            return
        self._is_queued = True
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self) -> None:
        self._num = 0
        before, self._num_called = self._num_called, 0
        while self._waiting and self._num_called < self._per_turn:
            place = self._waiting.popleft()
            if not place.done():  # else whoever waited was cancelled
                place.set_result(None)
                self._num_called += 1
        self._is_queued = before + self._num_called > 0
        self._is_turn_known = self._is_queued
        if self._is_queued:
            asyncio.get_running_loop().call_soon(self._next_turn)
