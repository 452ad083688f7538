"""What was admitted and has not ended, as device time. Pure: the time is passed in.

    charge   a request is let in: its prefill, and its decode within the horizon
    place    some worker has it: its prefill is told by the forecast from here on
    begin    it decodes: its charge runs down by a token per step, as far as nothing else is known
    settle   it ended: what is left of its charge is given back

A charge that nobody settles (its end was missed) is forgotten after ``MAX_AGE_S``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

MAX_AGE_S = 900.0  # no request has a later deadline
LATELY_S = 10.0  # over which a pace is taken


class Charge(msgspec.Struct, kw_only=True):
    """One request's.

    Args:
        prefill_ms: of its uncached prompt tokens, on the worker that would be done first.
        num_tokens: that it is likely to generate, over all choices.
        cap_tokens: how many of them the decode budget's horizon has room for.
        token_ms: device time of each.
        begins_s: when it decodes: as predicted, until a claim says so. None: nobody can tell.
        has_decoder: whoever decodes it has claimed it. Until then it has not begun, whatever was
            predicted: it may wait for room.
    """

    request_id: str
    served: str
    tenant: str
    priority: int
    num_prompt: int
    prefill_ms: float
    num_tokens: float
    cap_tokens: float
    token_ms: float
    charged_s: float
    begins_s: float | None = None
    num_choices: int = 1
    has_decoder: bool = False
    is_queued: bool = True  # no worker has it yet

    @property
    def num_steps(self) -> float:
        """For which it decodes."""
        return self.num_tokens / self.num_choices

    @property
    def whole_ms(self) -> float:
        """Its decode charge, as long as it has not begun."""
        return min(self.num_tokens, self.cap_tokens) * self.token_ms


class Ahead(NamedTuple):
    """Work that no worker has yet, before one request."""

    ms: float = 0.0  # device time of the prefills
    num: float = 0.0  # requests
    tokens: float = 0.0  # of their prompts
    steps: float = 0.0  # that they will decode for, together


NOTHING_AHEAD = Ahead()


class Pace(NamedTuple):
    """What is admitted in a second, as of late."""

    num: float = 0.0  # requests
    tokens: float = 0.0  # of their prompts
    prefill_ms: float = 0.0  # of a prompt, on average over tokens: the long ones count for more


@dataclass(slots=True)
class _Lately:
    """Sums over what was admitted, each part fading over ``LATELY_S``."""

    at_s: float = 0.0
    num: float = 0.0
    tokens: float = 0.0
    token_ms: float = 0.0

    def take(self, charge: Charge) -> None:
        part = self._part(charge.charged_s)
        self.at_s = max(self.at_s, charge.charged_s)
        self.num = self.num * part + 1
        self.tokens = self.tokens * part + charge.num_prompt
        self.token_ms = self.token_ms * part + charge.num_prompt * charge.prefill_ms

    def pace(self, at_s: float) -> Pace:
        """If nobody more comes until then."""
        part = self._part(at_s) / LATELY_S
        prefill_ms = self.token_ms / self.tokens if self.tokens > 0 else 0.0
        return Pace(self.num * part, self.tokens * part, prefill_ms)

    def _part(self, at_s: float) -> float:
        return math.exp(min(0.0, self.at_s - at_s) / LATELY_S)


@dataclass(slots=True)
class _Sum:
    """Of the charges of one kind; exactly 0 when there are none."""

    num: int = 0
    ms: float = 0.0
    tokens: float = 0.0
    steps: float = 0.0

    def add(self, ms: float, tokens: float = 0.0, steps: float = 0.0) -> None:
        self.num += 1
        self.ms += ms
        self.tokens += tokens
        self.steps += steps

    def remove(self, ms: float, tokens: float = 0.0, steps: float = 0.0) -> None:
        self.num -= 1
        if not self.num:
            self.ms = self.tokens = self.steps = 0.0
            return
        self.ms = self.ms - ms if self.ms > ms else 0.0
        self.tokens = self.tokens - tokens if self.tokens > tokens else 0.0
        self.steps = self.steps - steps if self.steps > steps else 0.0


@dataclass(slots=True)
class _Pool:
    charges: dict[str, Charge] = field(default_factory=dict)
    whole: _Sum = field(default_factory=_Sum)  # decode charges, as if none had begun
    lately: _Lately = field(default_factory=_Lately)
    queued: dict[tuple[int, str], _Sum] = field(default_factory=dict)  # by priority and tenant

    def queue_of(self, charge: Charge) -> _Sum:
        """Where it is counted while no worker has it."""
        key = charge.priority, charge.tenant
        found = self.queued.get(key)
        if found is None:
            found = self.queued[key] = _Sum()
        return found


class Books:
    """The charges of all pools, by request id.

    Cost: O(1) for each entry; O(tenants that wait) for :meth:`ahead`; O(charges of the pool)
    for :meth:`decode_ms`.
    """

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._served: dict[str, str] = {}  # request -> pool, oldest first

    def __len__(self) -> int:
        return len(self._served)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._served

    def charge(self, charge: Charge) -> bool:
        """Enter a request; False when it is there already."""
        if charge.request_id in self._served:
            return False
        self._served[charge.request_id] = charge.served
        pool = self._pools.get(charge.served)
        if pool is None:
            pool = self._pools[charge.served] = _Pool()
        pool.charges[charge.request_id] = charge
        pool.whole.add(charge.whole_ms, charge.num_tokens)
        pool.lately.take(charge)
        if charge.is_queued:
            pool.queue_of(charge).add(charge.prefill_ms, charge.num_prompt, charge.num_steps)
        return True

    def place(self, request_id: str) -> None:
        """Some worker has it."""
        found = self._find(request_id)
        if found is not None:
            self._unqueue(*found)

    def begin(self, request_id: str, at_s: float, *, has_decoder: bool = True) -> None:
        """It decodes from ``at_s`` on; what was said before of that is corrected.

        Args:
            has_decoder: whoever decodes it said so; else it is predicted anew.
        """
        found = self._find(request_id)
        if found is not None:
            self._unqueue(*found)
            found[1].begins_s, found[1].has_decoder = at_s, has_decoder

    def find(self, request_id: str) -> Charge | None:
        """What stands here of a request."""
        found = self._find(request_id)
        return None if found is None else found[1]

    def settle(self, request_id: str) -> Charge | None:
        """Take it out; None when it is not here."""
        found = self._find(request_id)
        if found is None:
            return None
        pool, charge = found
        self._unqueue(pool, charge)
        pool.whole.remove(charge.whole_ms, charge.num_tokens)
        del pool.charges[request_id], self._served[request_id]
        if not pool.charges:
            del self._pools[charge.served]
        return charge

    def forget(self, now_s: float) -> int:
        """Drop what was charged over ``MAX_AGE_S`` ago; how many those were."""
        num_before = len(self)
        while self._served:
            oldest, served = next(iter(self._served.items()))
            if now_s - self._pools[served].charges[oldest].charged_s <= MAX_AGE_S:
                break
            self.settle(oldest)
        return num_before - len(self)

    def ahead(self, served: str, tenant: str, priority: int, own_ms: float) -> Ahead:
        """Prefill work that no worker has yet and that a new request would stand behind.

        All of its own tenant's; of every other tenant as much as that one gets until the tenant's
        own is done, for they take turns. Less urgent work is not counted.
        """
        pool = self._pools.get(served)
        if pool is None or not pool.queued:
            return NOTHING_AHEAD
        by_tenant: dict[str, Ahead] = {}
        for (urgency, whose), total in pool.queued.items():
            if urgency >= priority:
                one = Ahead(total.ms, total.num, total.tokens, total.steps)
                before = by_tenant.get(whose)
                by_tenant[whose] = one if before is None else _plus(before, one)
        found = by_tenant.pop(tenant, NOTHING_AHEAD)
        turn_ms = found.ms + own_ms
        for theirs in by_tenant.values():
            part = min(1.0, turn_ms / theirs.ms) if theirs.ms > 0 else 1.0
            found = _plus(found, theirs, part)
        return found

    def pace(self, served: str, at_s: float) -> Pace:
        """How much will have been admitted in a second lately, if nothing is until ``at_s``."""
        pool = self._pools.get(served)
        return Pace() if pool is None else pool.lately.pace(at_s)

    def queued_ms(self, served: str) -> float:
        """All prefill work that no worker has yet."""
        pool = self._pools.get(served)
        return 0.0 if pool is None else sum(total.ms for total in pool.queued.values())

    def whole_ms(self, served: str) -> float:
        """Decode charges as if no request had begun: at least :meth:`decode_ms`."""
        pool = self._pools.get(served)
        return 0.0 if pool is None else pool.whole.ms

    def decode_ms(self, served: str, now_s: float, at_s: float, step_ms: float) -> float:
        """Decode charges as they will be at ``at_s``, if nothing is added."""
        left = self._left(served, now_s, at_s, step_ms)
        return sum(min(tokens, charge.cap_tokens) * charge.token_ms for charge, tokens in left)

    def whole_tokens(self, served: str) -> float:
        """That all together will generate, as if none had begun."""
        pool = self._pools.get(served)
        return 0.0 if pool is None else pool.whole.tokens

    def left_tokens(self, served: str, now_s: float, at_s: float, step_ms: float) -> float:
        """That those who are charged now will generate after ``at_s``."""
        return sum(tokens for _, tokens in self._left(served, now_s, at_s, step_ms))

    def _left(
        self, served: str, now_s: float, at_s: float, step_ms: float
    ) -> Iterator[tuple[Charge, float]]:
        """Of each charge the tokens after ``at_s``, when each step takes ``step_ms``."""
        per_s = 1000 / step_ms if step_ms > 0 else 0.0
        pool = self._pools.get(served)
        for charge in () if pool is None else pool.charges.values():
            left, begins_s = charge.num_tokens, charge.begins_s
            if begins_s is not None and at_s > begins_s:
                if begins_s < now_s and not charge.has_decoder:
                    begins_s = now_s
                left -= (at_s - begins_s) * per_s * charge.num_choices
            if left > 0:
                yield charge, left

    def pools(self) -> list[str]:
        """Those that have charges."""
        return list(self._pools)

    def _find(self, request_id: str) -> tuple[_Pool, Charge] | None:
        served = self._served.get(request_id)
        if served is None:
            return None
        pool = self._pools[served]
        return pool, pool.charges[request_id]

    @staticmethod
    def _unqueue(pool: _Pool, charge: Charge) -> None:
        if not charge.is_queued:
            return
        charge.is_queued = False
        queue = pool.queue_of(charge)
        queue.remove(charge.prefill_ms, charge.num_prompt, charge.num_steps)
        if not queue.num:
            del pool.queued[charge.priority, charge.tenant]

    def check_invariants(self) -> None:
        """Raise AssertionError when a sum is not that of its charges."""
        assert len(self._served) == sum(len(pool.charges) for pool in self._pools.values())
        for served, pool in self._pools.items():
            assert pool.charges, "an empty pool is dropped"
            charges = list(pool.charges.values())
            assert all(one.served == served for one in charges)
            _check(pool.whole, [one.whole_ms for one in charges])
            keys = {(one.priority, one.tenant) for one in charges if one.is_queued}
            assert keys == pool.queued.keys(), "a queue too many, or one too few"
            for key, total in pool.queued.items():
                queued = [one for one in charges if one.is_queued]
                mine = [one.prefill_ms for one in queued if (one.priority, one.tenant) == key]
                _check(total, mine)


def _plus(one: Ahead, other: Ahead, part: float = 1.0) -> Ahead:
    return Ahead(*(mine + part * theirs for mine, theirs in zip(one, other, strict=True)))


def _check(total: _Sum, parts: list[float]) -> None:
    assert total.num == len(parts), "charges that were not counted"
    assert total.ms >= 0, "a debt"
    assert abs(total.ms - sum(parts)) <= 1e-6 * (1 + sum(parts)), "a sum of something else"
