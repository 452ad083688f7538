"""Requests that outlive a connection: those read for another bridge, and those whose client may
come back.

    adopted    a client reads a request here that it, or another, submitted elsewhere or before;
               said on the bus at once and with every beat, so that nobody gives it up meanwhile
    waiting    the client of a request of ours is gone; it runs on for its window, which begins
               anew with every word that some bridge has adopted it; then it is cancelled

What waits when this process ends is left to the control process, which gives each request of a
dead bridge one more window (``pipeline/attendance.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from infra.log import Logger
from infra.pulse import next_pulse
from infra.times import Times
from pipeline.attendance import Adoptions
from schemas.errors import BusUnavailable, MeshError

_IDS_PER_MESSAGE = 1000  # 64 KB at most
_REASON = "no client came back within the resume window"


@dataclass(frozen=True, slots=True)
class _Wait:
    since_s: float
    window_s: float


class Windows:
    """The requests of one bridge that have no client, or not one of their own.

    Args:
        announce: says on the bus that we read these requests.
        cancel: ends a request of ours, with a reason.
        max_waiting: how many may wait for their client at once.
        now_s: a monotonic clock.
    """

    def __init__(
        self,
        announce: Callable[[Sequence[str]], Awaitable[None]],
        cancel: Callable[[str, str], Awaitable[None]],
        times: Times,
        log: Logger,
        *,
        max_waiting: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.longest_s = times.resume_window_s
        self._announce = announce
        self._cancel = cancel
        self._times = times
        self._log = log
        self._max_waiting = max_waiting
        self._now_s = now_s
        self._reading: Counter[str] = Counter()
        self._waiting: dict[str, _Wait] = {}
        self._adoptions = Adoptions()

    @property
    def num_waiting(self) -> int:
        """Requests that run on without a client."""
        return len(self._waiting)

    @asynccontextmanager
    async def adopted(self, request_id: str) -> AsyncIterator[None]:
        """The request is read here while the block runs."""
        self._reading[request_id] += 1
        try:
            await self._say([request_id])
            yield
        finally:
            self._reading[request_id] -= 1
            if not self._reading[request_id]:
                del self._reading[request_id]
            self.hear([request_id])

    def hear(self, request_ids: Sequence[str]) -> None:
        """Some bridge, maybe this one, reads these."""
        self._adoptions.hear(request_ids, self._now_s())

    def is_adopted(self, request_id: str) -> bool:
        """Whether some bridge has said within three beats that it reads this one."""
        return self._now_s() - self._adoptions.last_s(request_id) <= self._times.dead_s

    def wait_for_client(self, request_id: str, window_s: float) -> bool:
        """Let a request of ours run on without a client, for ``window_s``.

        Returns:
            False when too many do already.
        """
        if len(self._waiting) >= self._max_waiting:
            return False
        self._waiting[request_id] = _Wait(self._now_s(), window_s)
        return True

    async def run(self) -> None:
        """Once per beat: announce what is read here, end what waited long enough. For ever."""
        while True:
            await next_pulse(self._times.beat_s)
            await self.beat()

    async def beat(self) -> None:
        """What :meth:`run` does each time."""
        reading = list(self._reading)
        for start in range(0, len(reading), _IDS_PER_MESSAGE):
            await self._say(reading[start : start + _IDS_PER_MESSAGE])
        await self._end_overdue()
        self._adoptions.forget(self._now_s() - self.longest_s)

    async def _say(self, request_ids: Sequence[str]) -> None:
        self.hear(request_ids)
        with contextlib.suppress(BusUnavailable):  # the next beat says it again
            await self._announce(request_ids)

    async def _end_overdue(self) -> None:
        for request_id, wait in list(self._waiting.items()):
            since_s = max(wait.since_s, self._adoptions.last_s(request_id))
            if self._now_s() - since_s <= wait.window_s:
                continue
            try:
                await self._cancel(request_id, _REASON)
            except BusUnavailable:
                return  # the next beat tries again
            except MeshError as error:
                self._log.warning("cancel_failed", request_id=request_id, reason=error.message)
            self._waiting.pop(request_id, None)
