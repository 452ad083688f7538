"""Who may go to the workers now: the mesh's budget and waiting room, on virtual time.

It does what ``pipeline/doorkeeper.py`` does, with the same pure parts, where that has futures and a
timer of the event loop: after news, and when the forecast alone says that somebody has room, all
who may go are placed.
"""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from loadgen.simulate.events import EventQueue
from loadgen.simulate.request import Request
from pipeline.budget import Budget
from pipeline.fair_queue import Ticket
from pipeline.fleet import Fleet
from pipeline.outlook import Outlook
from pipeline.placement import Placement, PrefillPlace
from pipeline.prefix_walk import Found
from pipeline.prefixes import Prefixes
from pipeline.verdict import Admit, Ask, Clamp, Fallback, Refuse, Verdict, Wait
from pipeline.waiting_room import WaitingRoom
from schemas.control import Placed
from schemas.requests import RequestRecord
from schemas.subjects import ANY
from schemas.tokens import Claim

_AGAIN_S = 1.0  # until a budget is asked again that gave no answer for one who waits


class Exits(Protocol):
    """Where requests go from here."""

    def send_prefill(self, request: Request, place: PrefillPlace) -> None:
        """To a worker."""

    def refuse(self, request: Request, reason: str) -> None:
        """Back to its client."""


@dataclass(slots=True, kw_only=True)
class Minds:
    """What a control process decides with. Without a budget everybody is admitted, without a
    waiting room placed at once."""

    fleet: Fleet
    outlook: Outlook
    prefixes: Prefixes
    placement: Placement
    budget: Budget | None
    has_room: bool


@dataclass(slots=True)
class _Waiter:
    request: Request
    ask: Ask
    is_admitted: bool


class VirtualDoor:
    """The door of one control process.

    Attributes:
        decisions_s: CPU time of each placement of a prompt.
    """

    def __init__(self, minds: Minds, served: str, queue: EventQueue, exits: Exits) -> None:
        self.decisions_s: array[float] = array("d")
        self._minds = minds
        self._served = served
        self._queue = queue
        self._exits = exits
        self._waiters: dict[str, _Waiter] = {}
        self._room: WaitingRoom | None = None
        if minds.has_room:
            self._room = WaitingRoom(minds.fleet, minds.outlook, gate=self._gate)
        self._looks_at_s = math.inf

    @property
    def num_waiting(self) -> int:
        """Requests that have not been let go."""
        return len(self._waiters)

    def come(self, request: Request) -> None:
        """A request came: it is refused, goes, or waits."""
        record = request.record(self._served)
        if self._room is None and self._minds.budget is None:
            self._place(request, record)
            return
        ask = self._ask(request, record)
        verdict = self._judge(ask)
        if isinstance(verdict, Refuse | Fallback):
            reason = verdict.reason if isinstance(verdict, Refuse) else "another model is to answer"
            self._exits.refuse(request, reason)
            return
        if isinstance(verdict, Clamp):
            request.clamp(verdict.max_tokens)
        self._enter(request, record, ask, is_admitted=not isinstance(verdict, Wait))

    def _enter(
        self, request: Request, record: RequestRecord, ask: Ask, *, is_admitted: bool
    ) -> None:
        room, now_s = self._room, self._queue.now_s
        ticket = self._ticket(ask)
        overtakes = room is not None and room.overtakes(ticket)
        if room is None or (is_admitted and room.enter(ticket, now_s)):
            self._place(request, record, ask.found, overtakes=overtakes)
            return
        self._waiters[request.request_id] = _Waiter(request, ask, is_admitted)
        room.push(ticket, now_s)
        self.look()

    def _place(
        self,
        request: Request,
        record: RequestRecord,
        found: Found | None = None,
        *,
        overtakes: bool = False,
    ) -> None:
        begun_ns = time.thread_time_ns()
        place = self._minds.placement.place_prefill(record, hurries=overtakes, found=found)
        self.decisions_s.append((time.thread_time_ns() - begun_ns) / 1e9)
        if place.worker != ANY:
            if self._minds.budget is not None:
                self._minds.budget.place(request.request_id)
            if self._room is not None:
                self._room.openings.sent(request.request_id, self._served, place.worker)
        if overtakes:
            place = replace(place, overtakes=True)
        self._exits.send_prefill(request, place)

    # ---- the budget ----------------------------------------------------------------------

    def _ask(self, request: Request, record: RequestRecord) -> Ask:
        now_s, found = self._queue.now_s, self._minds.prefixes.find(record)
        return Ask(
            request_id=request.request_id,
            served=self._served,
            num_prompt=request.num_prompt,
            max_tokens=request.max_tokens,
            now_s=now_s,
            since_s=now_s,
            num_cached=self._num_cached(request, found),
            found=found,
            tenant=request.tenant,
            slo=request.slo,
        )

    def _num_cached(self, request: Request, found: Found) -> dict[str, int]:
        most = request.num_prompt - 1
        return {
            worker: min(match.num_blocks * request.block_size, most)
            for worker, match in found.items()
        }

    def _judge(self, ask: Ask) -> Verdict:
        budget = self._minds.budget
        if budget is None:
            return Admit()
        verdict = budget.judge(ask)
        if isinstance(verdict, Admit):
            budget.charge(ask)
        elif isinstance(verdict, Clamp):
            budget.charge(ask, verdict.max_tokens)
        return verdict

    def _gate(self, ticket: Ticket, now_s: float) -> Admit | Wait | Refuse:
        """The budget's last word on one whose turn has come."""
        waiter = self._waiters[ticket.request_id]
        if waiter.is_admitted:
            return Admit()
        ask = replace(waiter.ask, now_s=now_s, min_tokens=waiter.ask.max_tokens)
        verdict = self._judge(ask)
        if isinstance(verdict, Clamp | Fallback):
            return Wait(until_s=now_s + _AGAIN_S, shortage=verdict.shortage)
        return verdict

    # ---- what is heard -------------------------------------------------------------------

    def hear_placed(self, placed: Placed) -> None:
        """Another control process has placed a request."""
        if self._minds.budget is not None:
            self._minds.budget.hear_placed(placed, self._queue.now_s)
        if self._room is not None and placed.role == "prefill":
            self._room.openings.sent(placed.request_id, placed.served, placed.worker)

    def hear_claim(self, claim: Claim) -> None:
        """A worker has a request."""
        if self._minds.budget is not None:
            self._minds.budget.hear_claim(claim, self._queue.now_s)
        if self._room is not None:
            self._room.claimed(claim.request_id, claim.worker)
            self.look()

    def hear_end(self, request_id: str, num_tokens: int) -> None:
        """A request has its last token."""
        if self._minds.budget is not None:
            self._minds.budget.settle(request_id)
        if self._room is not None:
            self._room.ended(request_id, num_tokens)
            self.look()

    # ---- whose turn it is ----------------------------------------------------------------

    def look(self) -> None:
        """Somebody may go now: look when all that is heard in this moment has been heard."""
        if self._waiters:
            self._look_at(self._queue.now_s)

    def _look_at(self, time_s: float) -> None:
        if time_s < self._looks_at_s:
            self._looks_at_s = time_s
            self._queue.at(time_s, self._let_go_all, time_s)

    def _let_go_all(self, asked_s: float) -> None:
        room = self._room
        if room is None or asked_s != self._looks_at_s:
            return  # looked at before
        self._looks_at_s = math.inf
        while (ticket := room.next_ready(self._queue.now_s)) is not None:
            request = self._waiters.pop(ticket.request_id).request
            self._place(request, request.record(self._served))
        for ticket, refusal in room.take_refused():
            self._exits.refuse(self._waiters.pop(ticket.request_id).request, refusal.reason)
        again_s = room.next_look_s(self._queue.now_s)
        if again_s < math.inf:
            self._look_at(max(again_s, self._queue.now_s))

    def _ticket(self, ask: Ask) -> Ticket:
        return Ticket(
            request_id=ask.request_id,
            served=ask.served,
            num_uncached=ask.num_prompt - max(ask.num_cached.values(), default=0),
            expected_tokens=self._minds.outlook.expected_tokens(ask.served, ask.max_tokens),
            arrived_s=ask.since_s,
            tenant=ask.tenant,
            priority=ask.priority,
        )
