"""Few buffers for many: who asked first is served first."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from infra.transport.ucx.wire import Bytes


class Turns:
    """``count`` buffers of ``size`` bytes, handed out in the order of asking."""

    def __init__(self, count: int, size: int) -> None:
        self._free: list[Bytes] = [np.empty(size, np.uint8) for _ in range(count)]
        self._waiting: deque[asyncio.Future[Bytes]] = deque()
        self._error: Exception | None = None

    async def take(self) -> Bytes:
        """A buffer, ours until ``give_back``.

        Raises:
            Exception: what ``end`` was called with.
        """
        if self._error is not None:
            raise self._error
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[Bytes] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(turn.result())  # it came when we had given up
            raise

    def give_back(self, buffer: Bytes) -> None:
        """For the next."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(buffer)
                return
        self._free.append(buffer)

    def end(self, error: Exception) -> None:
        """Let nobody wait, now or later."""
        self._error = error
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)
