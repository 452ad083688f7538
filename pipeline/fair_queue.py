"""In which order requests that wait for a worker are let go. Pure: the time is passed in.

    1. priority    the highest first. A class of requests whose oldest has waited for ``aging_s``
                   counts as one priority higher, after twice that as two, and so on, but never as
                   higher than the highest that waits: it then shares with that one, and does not
                   overtake it.
    2. tenant      of what counts as equal, the tenant that has been served least: virtual token
                   counters, so a tenant that sends ten times as much gets as much as another.
    3. time        within a tenant, first come first served.

A whole class ages by its oldest request: if each request aged alone, a tenant's long backlog would
outrank the fresh requests of everybody else, which is what the counters are there to prevent.

Served is measured in tokens: prompt tokens that must be computed, and ``OUTPUT_WEIGHT`` times the
tokens generated, for those are dearer. A request is charged when it is let go with as many tokens
as it is likely to generate, and corrected at its end. A tenant that begins to wait is lifted to
``CREDIT_TOKENS`` under the least counter that those who wait ever had: nobody saves up for later
by being idle, and nobody pays for having been alone. The credit is for who uses less than its
share: its next request would else wait until the others have had as much as its last one. It may
overtake, then, all who wait, and also those that lie in a worker's queue already.

Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithms 2 and 3;
the credit is ours.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from pipeline.keyed_heap import KeyedHeap

OUTPUT_WEIGHT = 2.0  # of a generated token, in computed prompt tokens; the paper's
CREDIT_TOKENS = 32_768.0  # as many as a few long prompts: a fifth of a second of eight H100
AGING_S = 30.0
MAX_CLASS = 16  # a priority beyond 16, or below -16, counts as that: so classes are few
_MAX_IDLE_TENANTS = 4096
_FORGET_SHARE = 16  # this part of them is forgotten at once: to find the poorest they are sorted
_MAX_CHARGED = 65_536  # requests under way whose charge can still be corrected


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One request that waits.

    Args:
        served: the pool that it waits for: ``<model@rev>``.
        num_uncached: prompt tokens that no worker holds.
        expected_tokens: that it is likely to generate, over all choices.
        arrived_s: when it came first; whoever was given back keeps its place.
    """

    request_id: str
    served: str
    num_uncached: int
    expected_tokens: float
    arrived_s: float
    tenant: str = ""
    priority: int = 0

    @property
    def level(self) -> int:
        """The class that it waits in."""
        priority = self.priority
        if -MAX_CLASS <= priority <= MAX_CLASS:
            return priority
        return MAX_CLASS if priority > 0 else -MAX_CLASS


_Place = tuple[float, int]  # when it arrived, and its number among all that were pushed


@dataclass(slots=True)
class _Class:
    """What waits with one priority."""

    by_tenant: dict[str, KeyedHeap[str, _Place]] = field(default_factory=dict)
    oldest: KeyedHeap[str, _Place] = field(default_factory=KeyedHeap)  # request ids
    turns: KeyedHeap[str, float] = field(default_factory=KeyedHeap)  # tenants by their counter

    def add(self, ticket: Ticket, place: _Place, counter: float) -> None:
        self.oldest.put(ticket.request_id, place)
        waiting = self.by_tenant.get(ticket.tenant)
        if waiting is None:
            waiting = self.by_tenant[ticket.tenant] = KeyedHeap()
        waiting.put(ticket.request_id, place)
        self.turns.put(ticket.tenant, counter)

    def remove(self, ticket: Ticket) -> None:
        self.oldest.discard(ticket.request_id)
        waiting = self.by_tenant[ticket.tenant]
        waiting.discard(ticket.request_id)
        if not len(waiting):
            del self.by_tenant[ticket.tenant]
            self.turns.discard(ticket.tenant)

    def head(self) -> str:
        """The oldest request of the tenant whose turn it is."""
        tenant = self.turns.first()
        request_id = None if tenant is None else self.by_tenant[tenant].first()
        assert request_id is not None, "a class without requests is dropped"
        return request_id


@dataclass(slots=True)
class _Tenant:
    """What a tenant was served, in tokens, and how many of its requests wait."""

    counter: float = 0.0
    num_waiting: int = 0


class _Charge(msgspec.Struct, frozen=True):
    tenant: str
    tokens: float
    expected_tokens: float  # generated ones, of those


class FairQueue:
    """The requests that wait for one pool.

    Several control processes each have their own, and requests come to them at random: what is
    fair in each is fair in all.

    Args:
        aging_s: after so long a class of requests counts as one priority higher.
        credit_tokens: how much a tenant may be behind the others when it begins to wait.

    Cost: O(log n) for every call, n being what waits.
    """

    def __init__(self, *, aging_s: float = AGING_S, credit_tokens: float = CREDIT_TOKENS) -> None:
        self._aging_s = aging_s
        self._credit_tokens = credit_tokens
        self._num_pushed = 0
        self._tickets: dict[str, Ticket] = {}
        self._places: dict[str, _Place] = {}
        self._classes: dict[int, _Class] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: KeyedHeap[str, float] = KeyedHeap()  # tenants by their counter
        self._idle: set[str] = set()  # those that don't wait
        self._last = ""  # the tenant that was charged last
        self._level = 0.0  # the least counter so far; it never falls, so that credits don't add up
        self._charged: OrderedDict[str, _Charge] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tickets

    def push(self, ticket: Ticket) -> None:
        """Let ``ticket`` wait.

        Raises:
            ValueError: its request waits already.
        """
        if ticket.request_id in self._tickets:
            raise ValueError(f"{ticket.request_id} waits already")
        self._num_pushed += 1
        place = (ticket.arrived_s, self._num_pushed)
        tenant = self._lifted(ticket.tenant)
        if not tenant.num_waiting:
            self._idle.discard(ticket.tenant)
            self._waiting.put(ticket.tenant, tenant.counter)
        tenant.num_waiting += 1
        self._tickets[ticket.request_id] = ticket
        self._places[ticket.request_id] = place
        level = self._classes.get(ticket.level)
        if level is None:
            level = self._classes[ticket.level] = _Class()
        level.add(ticket, place, tenant.counter)

    def first(self, now_s: float) -> Ticket | None:
        """Whose turn it is at ``now_s``; None when nobody waits."""
        if not self._classes:
            return None
        heads = [found.head() for found in self._eligible(now_s)]
        return self._tickets[min(heads, key=self._turn)]

    def pop(self, now_s: float) -> Ticket | None:
        """Let go whose turn it is, and charge its tenant."""
        ticket = self.first(now_s)
        if ticket is not None:
            self.let_go(ticket)
        return ticket

    def let_go(self, ticket: Ticket) -> None:
        """The same of one that waits here, whosever turn it is."""
        self.charge(ticket)
        self.remove(ticket.request_id)

    def remove(self, request_id: str) -> Ticket | None:
        """Take out a request that is not to be served any more; nothing is charged.

        Returns:
            Its ticket; None when it does not wait.
        """
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return None
        del self._places[request_id]
        level = self._classes[ticket.level]
        level.remove(ticket)
        if not len(level.oldest):
            del self._classes[ticket.level]
        tenant = self._tenants[ticket.tenant]
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            self._waiting.discard(ticket.tenant)
            self._rest(ticket.tenant)
        return ticket

    def charge(self, ticket: Ticket) -> None:
        """``ticket`` is let go, whether it waited or not. One that was charged before, and came
        back, is charged once."""
        self._lifted(ticket.tenant)
        before = self._charged.pop(ticket.request_id, None)
        if before is not None:
            self._add(before.tenant, -before.tokens)
        tokens = ticket.num_uncached + OUTPUT_WEIGHT * ticket.expected_tokens
        self._charged[ticket.request_id] = _Charge(ticket.tenant, tokens, ticket.expected_tokens)
        if len(self._charged) > _MAX_CHARGED:
            self._charged.popitem(last=False)  # what became of it was not heard
        self._add(ticket.tenant, tokens)
        self._last = ticket.tenant

    def settle(self, request_id: str, num_tokens: int | None) -> None:
        """A request ended with ``num_tokens`` generated; None: nobody knows how many, and what it
        was charged stands. Unknown ids are nothing."""
        charge = self._charged.pop(request_id, None)
        if charge is not None and num_tokens is not None:
            self._add(charge.tenant, OUTPUT_WEIGHT * (num_tokens - charge.expected_tokens))

    def counter(self, tenant: str) -> float:
        """What ``tenant`` was served, in tokens, lifts included; 0 for one that is not known."""
        found = self._tenants.get(tenant)
        return 0.0 if found is None else found.counter

    def overtakes(self, ticket: Ticket) -> bool:
        """Whether a request that comes now goes before all who wait: none has a higher priority,
        and its tenant, of which nobody waits, was served less than any of theirs. While nobody
        waits there is nobody to overtake."""
        if not self._tickets or ticket.tenant in self._waiting:
            return False
        least = self._waiting.least()
        if least is None or ticket.level < max(self._classes):
            return False
        return max(self.counter(ticket.tenant), self._floor()) < least

    def num_waiting_by_level(self) -> dict[int, int]:
        """How many requests wait, by priority."""
        return {level: len(found.oldest) for level, found in self._classes.items()}

    def _eligible(self, now_s: float) -> list[_Class]:
        """The highest class, and those that have aged as far as that. At most 33 are looked at."""
        top = max(self._classes)
        found = []
        for level, one in self._classes.items():
            oldest = one.oldest.least()
            assert oldest is not None, "a class without requests is dropped"
            if now_s - oldest[0] >= (top - level) * self._aging_s:
                found.append(one)
            elif level == top:  # its clock may stand before its oldest's arrival
                found.append(one)
        return found

    def _turn(self, request_id: str) -> tuple[float, _Place]:
        return self._tenants[self._tickets[request_id].tenant].counter, self._places[request_id]

    def _lifted(self, name: str) -> _Tenant:
        """The tenant's account; lifted, when none of its requests waits yet."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._rest(name)
            tenant = self._tenants[name] = _Tenant()
        if not tenant.num_waiting:
            self._level = max(self._level, self._reached())
            tenant.counter = max(tenant.counter, self._level - self._credit_tokens)
        return tenant

    def _reached(self) -> float:
        """How far those are who wait, or who went last: the least counter."""
        least = self._waiting.least()
        return self.counter(self._last) if least is None else least

    def _floor(self) -> float:
        """Where a tenant is, at least, that begins to wait now."""
        return max(self._level, self._reached()) - self._credit_tokens

    def _add(self, name: str, tokens: float) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            return  # it was idle for so long that it was forgotten
        tenant.counter += tokens
        if tenant.num_waiting:
            self._waiting.put(name, tenant.counter)
            for one in self._classes.values():
                if name in one.by_tenant:
                    one.turns.put(name, tenant.counter)

    def _rest(self, name: str) -> None:
        """A tenant does not wait, or not yet. When too many don't, those are forgotten that were
        served least: their counters would be lifted beyond that anyhow."""
        if len(self._idle) >= _MAX_IDLE_TENANTS:
            served = sorted((self._tenants[one].counter, one) for one in self._idle)
            for _, one in served[: max(1, _MAX_IDLE_TENANTS // _FORGET_SHARE)]:
                self._idle.remove(one)
                del self._tenants[one]
        self._idle.add(name)

    def check_invariants(self) -> None:
        """All views of what waits agree, and nothing is kept for who is not there."""
        listed = [
            (request_id, level, tenant)
            for level, one in self._classes.items()
            for tenant, waiting in one.by_tenant.items()
            for request_id in self._tickets
            if request_id in waiting
        ]
        assert len(listed) == len(self._tickets) == len(self._places)
        for request_id, level, tenant in listed:
            ticket = self._tickets[request_id]
            assert (ticket.level, ticket.tenant) == (level, tenant)
        for name, tenant_ in self._tenants.items():
            num = sum(ticket.tenant == name for ticket in self._tickets.values())
            assert tenant_.num_waiting == num
            assert (name in self._waiting) == (num > 0) != (name in self._idle)
        for level, one in self._classes.items():
            assert len(one.oldest) == sum(map(len, one.by_tenant.values())) > 0, level
            assert all(name in one.turns for name in one.by_tenant)
            assert len(one.turns) == len(one.by_tenant)
        assert len(self._idle) <= _MAX_IDLE_TENANTS
        assert len(self._charged) <= _MAX_CHARGED
