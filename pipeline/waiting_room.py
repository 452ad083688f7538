"""Requests that wait for a worker with room, in fair order. Pure: the time is passed in.

Each pool has a queue of its own (``pipeline/fair_queue.py``), whose first is let go when the pool
is open (``pipeline/openings.py``) and the compute budget, if it told the request to wait, has room
for it. While the first may not go, nobody behind it does: what it waits for would else be used up
by those who need less of it.

Who is far behind its share does not wait for work of others to be done, neither here nor in a
worker: it overtakes. How much may do so is bounded by the tenant's credit and by the workers'
places, so the others lose little by it.

    enter      it goes at once, if nobody waits and there is room, or if it overtakes
    push       it waits
    next_ready whose turn it is, once there is room; None: nobody's now
    leave      it is not to be served any more
    ended      it is over, with so many tokens: what its tenant was charged is corrected
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

from pipeline.company import Company
from pipeline.fair_queue import AGING_S, FairQueue, Ticket
from pipeline.fleet import Fleet
from pipeline.forecast import Forecast
from pipeline.openings import AHEAD_MS, MIXED_AHEAD_MS, Openings
from pipeline.verdict import Admit, Refuse, Wait
from schemas.subjects import ANY

_LEAST_BLOCK_S = 0.01  # a budget is not asked in a circle

Gate = Callable[[Ticket, float], Admit | Wait | Refuse]


def no_gate(_: Ticket, __: float) -> Admit:
    """Without a compute budget everybody may go."""
    return Admit()


class WaitingRoom:
    """The requests that this control process lets wait.

    Args:
        gate: asked of the one whose turn it is, right before it goes: Admit charges it.
        ahead_ms, aging_s: see ``pipeline/openings.py``, ``pipeline/fair_queue.py``.
        mixed_ahead_ms: in place of ``ahead_ms``, if that is more, while requests of several
            tenants or priorities come to a pool.
    """

    def __init__(
        self,
        fleet: Fleet,
        forecast: Forecast,
        *,
        gate: Gate = no_gate,
        ahead_ms: float = AHEAD_MS,
        mixed_ahead_ms: float = MIXED_AHEAD_MS,
        aging_s: float = AGING_S,
    ) -> None:
        self.openings = Openings(fleet, forecast, ahead_ms=ahead_ms)
        self._gate = gate
        self._mixed_ahead_ms = min(ahead_ms, mixed_ahead_ms)
        self._company: dict[str, Company] = {}  # by pool
        self._aging_s = aging_s
        self._queues: dict[str, FairQueue] = {}
        self._served_of: dict[str, str] = {}  # requests that wait
        self._blocked_s: dict[str, float] = {}  # by pool: the budget said "not before"
        self._turn: deque[str] = deque()  # pools, so that none waits behind another's crowd
        self._refused: list[tuple[Ticket, Refuse]] = []

    def __len__(self) -> int:
        return len(self._served_of)

    def num_waiting(self, served: str) -> int:
        """How many wait for the pool ``served``."""
        queue = self._queues.get(served)
        return 0 if queue is None else len(queue)

    def queue(self, served: str) -> FairQueue:
        """The queue of a pool, made when first asked for."""
        found = self._queues.get(served)
        if found is None:
            found = self._queues[served] = FairQueue(aging_s=self._aging_s)
            self._turn.append(served)
        return found

    def overtakes(self, ticket: Ticket) -> bool:
        """Whether a request that comes now goes before those who wait here, and before those that
        lie in the queue of the worker that gets it."""
        queue = self._queues.get(ticket.served)
        return queue is not None and queue.overtakes(ticket)

    def has_ticket(self, request_id: str) -> bool:
        """Whether a request waits here."""
        return request_id in self._served_of

    def push(self, ticket: Ticket, now_s: float) -> None:
        """Let ``ticket`` wait.

        Raises:
            ValueError: its request waits already.
        """
        self.queue(ticket.served).push(ticket)
        self._come(ticket, now_s)
        self._served_of[ticket.request_id] = ticket.served
        self._blocked_s.pop(ticket.served, None)  # another may be the first now

    def enter(self, ticket: Ticket, now_s: float) -> bool:
        """Let ``ticket`` go at once, when nobody waits and there is room; one that overtakes needs
        a worker's place alone, however much lies before it there.

        Returns:
            Whether it went; else it has to be pushed.
        """
        queue = self.queue(ticket.served)
        self._come(ticket, now_s)
        if queue.overtakes(ticket):
            opens_s = self.openings.opens_s(ticket.served, now_s, math.inf)
        else:
            opens_s = math.inf if len(queue) else self._opens_s(ticket.served, now_s)
        if opens_s > now_s:
            return False
        queue.charge(ticket)
        self._let_go(ticket)
        return True

    def next_ready(self, now_s: float) -> Ticket | None:
        """Let go whose turn it is. It counts as on its way to any worker until ``sent`` of
        :attr:`openings` names one."""
        for served in self._pools():
            queue = self._queues[served]
            while self._may_go(served, now_s):
                ticket = queue.first(now_s)
                assert ticket is not None, "a pool of which somebody may go has a first"
                verdict = self._gate(ticket, now_s)
                if isinstance(verdict, Admit):
                    queue.let_go(ticket)
                    del self._served_of[ticket.request_id]
                    self._let_go(ticket)
                    return ticket
                if isinstance(verdict, Refuse):
                    self.leave(ticket.request_id)
                    self._refused.append((ticket, verdict))
                    continue
                self._blocked_s[served] = max(verdict.until_s, now_s + _LEAST_BLOCK_S)
        return None

    def take_refused(self) -> list[tuple[Ticket, Refuse]]:
        """Those whose turn had come and for whom the budget, in the end, has no room."""
        refused, self._refused = self._refused, []
        return refused

    def leave(self, request_id: str) -> Ticket | None:
        """Take a request out that waits; its ticket, None when it does not."""
        if not self.has_ticket(request_id):
            return None
        served = self._served_of.pop(request_id)
        self._blocked_s.pop(served, None)
        return self._queues[served].remove(request_id)

    def claimed(self, request_id: str, worker: str) -> Ticket | None:
        """A worker holds a request. Who waits here has come to it by way of another control
        process: it leaves."""
        self.openings.claimed(request_id, worker)
        return self.leave(request_id)

    def ended(self, request_id: str, num_tokens: int | None) -> Ticket | None:
        """A request is over, with ``num_tokens`` generated; None: nobody knows.

        Returns:
            Its ticket, when it waited here.
        """
        self.openings.ended(request_id)
        self._blocked_s.clear()  # there is more of everybody's budget
        for queue in self._queues.values():
            queue.settle(request_id, num_tokens)
        return self.leave(request_id)

    def next_look_s(self, now_s: float) -> float:
        """When, as far as time alone brings it, somebody may go; infinite: with news only."""
        waiting = [served for served, queue in self._queues.items() if len(queue)]
        return min((self._looks_s(served, now_s) for served in waiting), default=math.inf)

    def _looks_s(self, served: str, now_s: float) -> float:
        return max(self._opens_s(served, now_s), self._blocked_s.get(served, now_s))

    def _opens_s(self, served: str, now_s: float) -> float:
        company = self._company.get(served)
        is_mixed = company is not None and company.is_mixed(now_s)
        return self.openings.opens_s(served, now_s, self._mixed_ahead_ms if is_mixed else None)

    def _come(self, ticket: Ticket, now_s: float) -> None:
        company = self._company.get(ticket.served)
        if company is None:
            company = self._company[ticket.served] = Company()
        company.come((ticket.tenant, ticket.level), now_s)

    def _may_go(self, served: str, now_s: float) -> bool:
        if not len(self._queues[served]) or self._blocked_s.get(served, now_s) > now_s:
            return False
        return self._opens_s(served, now_s) <= now_s

    def _pools(self) -> Iterator[str]:
        """Every pool once, another one first each time."""
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            yield self._turn[-1]

    def _let_go(self, ticket: Ticket) -> None:
        self.openings.sent(ticket.request_id, ticket.served, ANY, ticket.num_uncached)

    def check_invariants(self) -> None:
        """Who waits is known to wait, once."""
        self.openings.check_invariants()
        for served, queue in self._queues.items():
            queue.check_invariants()
            known = [one for one, pool in self._served_of.items() if pool == served]
            assert len(known) == len(queue)
            assert all(one in queue for one in known)
