"""Who may go to the workers now, and where: budget, waiting room and placement together.

    ask      what the compute budget is asked about a request
    judge    what it says; who is admitted is charged at once
    enter    a place at once, or None: it must wait
    wait     a place once its turn has come, or None: it ended, or went another way
    hear_*   news; whoever may go now goes

Whoever waits is let go in one place, :meth:`Doorkeeper._let_go_all`, and placed in the same breath,
so that the next one is judged by what is then known. That is called after news, and when the
forecast alone says that somebody has room; never more often than a fifth of the loop's time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.budget import Budget
from pipeline.degradation import error_of
from pipeline.door_meter import DoorMeter
from pipeline.fair_queue import AGING_S, Ticket
from pipeline.fleet import Fleet
from pipeline.forecast import Forecast
from pipeline.openings import AHEAD_MS, MIXED_AHEAD_MS
from pipeline.placement import Placement, PrefillPlace
from pipeline.prefix_hash import ID_BYTES
from pipeline.prefix_walk import Found
from pipeline.prefixes import Prefixes
from pipeline.verdict import Admit, Ask, Clamp, Fallback, Refuse, Verdict, Wait
from pipeline.waiting_room import WaitingRoom
from schemas import subjects
from schemas.control import Placed
from schemas.requests import RequestRecord
from schemas.tokens import Claim

_REST = 4.0  # of the time that letting go took: what comes meanwhile is seen together
_AGAIN_S = 1.0  # until a budget is asked again that gave no answer for one who waits


@dataclass(slots=True, kw_only=True)
class _Waiter:
    """A request that waits, and who waits for its place."""

    record: RequestRecord
    ask: Ask
    is_admitted: bool  # by the budget; else it is asked again
    since_s: float
    place: asyncio.Future[PrefillPlace | None]

    def tell(self, outcome: PrefillPlace | Exception | None) -> None:
        """Its place, or why it has none; nothing, if it was cancelled in this very moment."""
        if self.place.done():
            return
        if isinstance(outcome, Exception):
            self.place.set_exception(outcome)
        else:
            self.place.set_result(outcome)


class Doorkeeper:
    """Lets requests of this control process go.

    Args:
        budget, forecast: told of beats, claims and ends by their owner, before this is.
        prefixes: None: nothing is known of what workers hold.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        forecast: Forecast,
        budget: Budget,
        placement: Placement,
        prefixes: Prefixes | None,
        meter: DoorMeter,
        *,
        ahead_ms: float = AHEAD_MS,
        mixed_ahead_ms: float = MIXED_AHEAD_MS,
        aging_s: float = AGING_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.room = WaitingRoom(
            fleet,
            forecast,
            gate=self._gate,
            ahead_ms=ahead_ms,
            mixed_ahead_ms=mixed_ahead_ms,
            aging_s=aging_s,
        )
        self._fleet = fleet
        self._forecast = forecast
        self._budget = budget
        self._placement = placement
        self._prefixes = prefixes
        self._meter = meter
        self._clock = clock
        self._waiters: dict[str, _Waiter] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # in which the first one waited
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # on the loop's clock, when it rings
        self._rests_until_s = -math.inf  # in the loop's time, as the timer

    # What admission asks ---------------------------------------------------------------------

    def ask(self, record: RequestRecord, *, age_s: float = 0.0, asked_model: str = "") -> Ask:
        """``record`` as the budget sees it.

        Args:
            age_s: how long ago it was asked for first.
            asked_model: what the client asked for, where this is the record of a fallback.
        """
        now_s, sampling = self._clock(), record.sampling
        num_prompt = len(record.prompt_ids) // ID_BYTES
        found = None if self._prefixes is None else self._prefixes.find(record)
        return Ask(
            request_id=record.request_id,
            served=record.served,
            num_prompt=num_prompt,
            max_tokens=(sampling.max_tokens or 0) * sampling.n,
            now_s=now_s,
            since_s=now_s - age_s,
            num_cached=self._num_cached(record, num_prompt, found),
            found=found,
            num_choices=sampling.n,
            min_tokens=sampling.min_tokens * sampling.n,
            tenant=record.tenant,
            priority=record.priority,
            slo=record.slo,
            asked_model=asked_model,
        )

    def judge(self, ask: Ask) -> Verdict:
        """What the budget says. Who is admitted is charged in the same moment: those who are asked
        about next would else be told that nobody is before them."""
        verdict = self._budget.judge(ask)
        if isinstance(verdict, Admit):
            self._budget.charge(ask)
        elif isinstance(verdict, Clamp):
            self._budget.charge(ask, verdict.max_tokens)
        return verdict

    def admit(self, ask: Ask) -> None:
        """Charge a request that was admitted before, by whichever control process."""
        self._budget.charge(ask)

    def drop(self, request_id: str) -> None:
        """A request that was judged does not enter after all."""
        self._budget.settle(request_id)

    def is_under_way(self, request_id: str) -> bool:
        """Whether a task of a request is known to be in a queue, or a worker to have it."""
        return self.room.openings.is_under_way(request_id)

    def enter(self, record: RequestRecord, ask: Ask) -> PrefillPlace | None:
        """The place of a request that the budget has admitted; None: others are before it, or no
        worker has room soon, and it must :meth:`wait`."""
        ticket = _ticket(ask, self._forecast)
        overtakes = self.room.overtakes(ticket)
        if not self.room.enter(ticket, self._clock()):
            return None
        self._meter.went(ticket)
        return self._place(record, ask, ask.found, overtakes=overtakes)

    def place(self, record: RequestRecord, ask: Ask) -> PrefillPlace:
        """Where a request goes that has had its turn. What is held of its prompt is looked up anew:
        it may have waited for long."""
        return self._place(record, ask, None)

    def _place(
        self, record: RequestRecord, ask: Ask, found: Found | None, *, overtakes: bool = False
    ) -> PrefillPlace:
        place = self._placement.place_prefill(record, hurries=overtakes, found=found)
        if place.worker != subjects.ANY:
            self._budget.place(ask.request_id)
            self.room.openings.sent(ask.request_id, ask.served, place.worker)
        return replace(place, overtakes=True) if overtakes else place

    async def wait(
        self, record: RequestRecord, ask: Ask, *, is_admitted: bool
    ) -> PrefillPlace | None:
        """Wait for a turn; one that waits already has one. It may be cancelled.

        Args:
            is_admitted: by the budget; else it is asked again when the turn has come.

        Returns:
            A place; None when the request has ended, or a worker has it already.

        Raises:
            OverBudget: its policy does not let it wait any longer.
        """
        if ask.request_id in self._waiters:  # published twice: the first one's message goes on
            return None
        self._loop = loop = self._loop or asyncio.get_running_loop()
        waiter = _Waiter(
            record=record,
            ask=ask,
            is_admitted=is_admitted,
            since_s=self._clock(),
            place=loop.create_future(),
        )
        self._waiters[ask.request_id] = waiter
        ticket = _ticket(ask, self._forecast)
        self.room.push(ticket, waiter.since_s)
        self._meter.waits(ticket)
        self._look()
        try:
            return await waiter.place
        finally:
            del self._waiters[ask.request_id]
            if self.room.leave(ask.request_id) is not None:
                self._budget.settle(ask.request_id)
            self._meter.left(ticket, self._clock() - waiter.since_s)

    # What is heard ---------------------------------------------------------------------------

    def hear_beat(self) -> None:
        """Somebody told of itself; the fleet and the forecast may have changed."""
        self._look()

    def hear_placed(self, placed: Placed) -> None:
        """Another control process gave a request to a worker by name."""
        if placed.role == "prefill":
            self.room.openings.sent(placed.request_id, placed.served, placed.worker)

    def hear_claim(self, claim: Claim) -> None:
        """A worker holds a request. One that waits here went another way: it waits no longer."""
        self._went_elsewhere(self.room.claimed(claim.request_id, claim.worker))

    def hear_end(self, request_id: str, num_tokens: int | None) -> None:
        """A request is over, with ``num_tokens`` of all its choices; None: it was cut off."""
        self._went_elsewhere(self.room.ended(request_id, num_tokens))

    def _went_elsewhere(self, left: Ticket | None) -> None:
        if left is not None:
            self._waiters[left.request_id].tell(None)
        self._look()

    def waiting(self) -> Iterator[RequestRecord]:
        """All that wait here."""
        return (waiter.record for waiter in self._waiters.values())

    def _num_cached(
        self, record: RequestRecord, num_prompt: int, found: Found | None
    ) -> dict[str, int]:
        """By worker, how many tokens of the prompt it need not compute: the last it always does."""
        if not found:
            return {}
        layouts = self._fleet.layouts(record.served)
        return {
            worker: min(match.num_blocks * layouts[worker][1], num_prompt - 1)
            for worker, match in found.items()
        }

    # Whose turn it is ------------------------------------------------------------------------

    def _look(self) -> None:
        """Somebody may go now: look soon."""
        if self._loop is not None and len(self.room):
            self._look_at(self._loop, self._loop.time())

    def _look_at(self, loop: asyncio.AbstractEventLoop, loop_s: float) -> None:
        at_s = max(loop_s, self._rests_until_s)
        if self._timer is not None:
            if self._timer_s <= at_s:
                return
            self._timer.cancel()
        self._timer_s = at_s  # a due timer of uvloop can't be asked
        self._timer = loop.call_at(at_s, self._let_go_all, loop)

    def _let_go_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        began_s = loop.time()
        while (ticket := self.room.next_ready(self._clock())) is not None:
            waiter = self._waiters[ticket.request_id]
            self._meter.went(ticket)
            try:
                waiter.tell(self.place(waiter.record, waiter.ask))
            except Exception as error:  # the message comes again, or is buried: see the stage
                waiter.tell(error)
        for ticket, refusal in self.room.take_refused():
            self._waiters[ticket.request_id].tell(error_of(refusal, ticket.served))
        ended_s = loop.time()
        self._rests_until_s = ended_s + _REST * (ended_s - began_s)
        now_s = self._clock()
        again_s = self.room.next_look_s(now_s)
        if again_s < math.inf:
            self._look_at(loop, ended_s + max(0.0, again_s - now_s))

    def _gate(self, ticket: Ticket, now_s: float) -> Admit | Wait | Refuse:
        """The budget's last word on one whose turn has come. Its client has been told its model
        and its length, so another model or fewer tokens are no answer any more."""
        waiter = self._waiters[ticket.request_id]
        if waiter.is_admitted:
            return Admit()
        ask = replace(
            waiter.ask,
            now_s=now_s,
            min_tokens=waiter.ask.max_tokens,
            asked_model=waiter.ask.asked_model or waiter.record.model,
        )
        verdict = self._budget.judge(ask)
        if isinstance(verdict, Clamp | Fallback):
            return Wait(until_s=now_s + _AGAIN_S, shortage=verdict.shortage)
        if isinstance(verdict, Admit):
            self._budget.charge(ask)
        return verdict


def _ticket(ask: Ask, forecast: Forecast) -> Ticket:
    return Ticket(
        request_id=ask.request_id,
        served=ask.served,
        num_uncached=ask.num_prompt - (max(ask.num_cached.values()) if ask.num_cached else 0),
        expected_tokens=forecast.expected_tokens(ask.served, ask.max_tokens),
        arrived_s=ask.since_s,
        tenant=ask.tenant,
        priority=ask.priority,
    )
