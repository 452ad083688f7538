"""How many requests of each model wait for a prefill worker, and when the queue has room again.

    tasks in the prefill queues, and admissions without an ack,
    as the broker counts them, at most a second old
    + what this process admitted since                     -> full?
    claims of a first epoch, as all processes hear them    -> how fast the queue is taken
    both                                                   -> Retry-After

Several admission processes each add their own since the last count, so together they may pass the
limit by what they admit in a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.bus import WORK, Bus
from schemas import subjects
from schemas.errors import QueueFull
from schemas.tokens import Claim

COUNT_S = 1.0  # how old the broker's count may be
RATE_S = 10.0  # over which the rate of claims is taken
_TOGETHER_S = 0.1  # claims within it are counted, not kept
MAX_RETRY_S = 60.0  # more nobody waits, and workers may have come by then
_UNKNOWN_S = 1.0  # Retry-After while nothing is being taken
_IN_WORK = 64  # admissions without an ack that do not wait: two processes are at work on so many


@dataclass(slots=True)
class _Claims:
    """Those of one moment."""

    since_s: float
    num: int = 0


@dataclass(slots=True)
class Queue:
    """One model's waiting requests, as this process knows them. Pure: the time is passed in."""

    counted: int = 0
    counted_s: float = -math.inf
    num_since: int = 0  # admitted here since it was counted
    _claims: deque[_Claims] = field(default_factory=deque)  # oldest first
    _num_claims: int = 0

    @property
    def num_waiting(self) -> int:
        """At least so many; fewer by what was taken since the count."""
        return self.counted + self.num_since

    def is_stale(self, now_s: float) -> bool:
        """Whether the broker must be asked again."""
        return now_s - self.counted_s > COUNT_S

    def count(self, num: int, now_s: float) -> None:
        """Take the broker's count."""
        self.counted, self.counted_s, self.num_since = num, now_s, 0

    def note_claim(self, now_s: float) -> None:
        """A worker took one."""
        if not self._claims or now_s - self._claims[-1].since_s >= _TOGETHER_S:
            self._claims.append(_Claims(now_s))
        self._claims[-1].num += 1
        self._num_claims += 1
        self._forget(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """When all that waits now will have been taken, at the present rate."""
        self._forget(now_s)
        if not self._claims:
            return _UNKNOWN_S
        rate = self._num_claims / max(COUNT_S, now_s - self._claims[0].since_s)
        return min(max(self.num_waiting / rate, _UNKNOWN_S), MAX_RETRY_S)

    def _forget(self, now_s: float) -> None:
        while self._claims and now_s - self._claims[0].since_s > RATE_S:
            self._num_claims -= self._claims.popleft().num


class Backlog:
    """The queues of all models, held to a limit.

    Args:
        limit: requests of one model that may wait.
        waiting: how many of ``<model@rev>`` wait in this process for their turn.
    """

    def __init__(
        self,
        bus: Bus,
        limit: int,
        waiting: Callable[[str], int] = lambda served: 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._limit = limit
        self._waiting = waiting
        self._clock = clock
        self._queues: dict[str, Queue] = {}
        self._counting = asyncio.Lock()

    async def enter(self, served: str) -> None:
        """Count one more request of ``served``.

        Raises:
            QueueFull: so many wait already; says when to try again.
            BusUnavailable: they can't be counted now.
        """
        queue = self._queue(served)
        if queue.is_stale(self._clock()):
            async with self._counting:  # one question for all who wait for its answer
                if queue.is_stale(self._clock()):
                    queue.count(await self._ask(served), self._clock())
        if queue.num_waiting >= self._limit:
            raise self.full(served)
        queue.num_since += 1

    def full(self, served: str) -> QueueFull:
        """What a client is told whose request finds no place."""
        queue = self._queue(served)
        model, _ = subjects.split_served(served)
        return QueueFull(
            f"{queue.num_waiting} requests for {model} wait already",
            param="model",
            retry_after_s=queue.retry_after_s(self._clock()),
        )

    def note_claim(self, claim: Claim) -> None:
        """A claim was heard: the first of a request takes it out of the queue."""
        if claim.epoch == 1 and claim.served in self._queues:
            self._queues[claim.served].note_claim(self._clock())

    def _queue(self, served: str) -> Queue:
        found = self._queues.get(served)
        if found is None:
            found = self._queues[served] = Queue()
        return found

    async def _ask(self, served: str) -> int:
        everyone = subjects.prefill(served, subjects.ANY).removesuffix(subjects.ANY) + "*"
        num_tasks, num_here = await self._count(everyone), self._waiting(served)
        if not num_here:
            return num_tasks
        model, _ = subjects.split_served(served)  # where some wait here, others wait elsewhere
        num_unacked = await self._count(subjects.admission(model))
        return num_tasks + max(num_here, num_unacked - _IN_WORK)

    async def _count(self, subject: str) -> int:
        info = await self._bus.api(f"STREAM.INFO.{WORK}", {"subjects_filter": subject})
        return sum((info["state"].get("subjects") or {}).values())
