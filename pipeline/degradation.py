"""What becomes of a request that is over budget: the rungs of its model's policy, in order. Pure.

wait       until the budget is predicted to be under again, if that is within ``max_wait_s``
clamp      fewer tokens, where memory or decode time is short and they would do
fallback   another model answers; its own fallback is not asked
refuse     429 with the time until the same request would be admitted
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.budget_case import Case
from pipeline.policy import Policy, Rung
from pipeline.verdict import Ask, Clamp, Fallback, Refuse, Shortage, Verdict, Wait
from schemas import subjects
from schemas.errors import MeshError, OverBudget, SloUnreachable

DRAIN_KEPT_S = 0.25
_MAX_DRAINS = 1024
UNKNOWN_S = 1.0  # told where nobody knows
_CLAMPED: frozenset[Shortage] = frozenset(("kv", "decode"))  # what fewer tokens are good for
_WORDS: dict[Shortage, str] = {
    "ttft": "too much waits to be prefilled for the first token to come in time",
    "tbt": "too many sequences would be decoded at once",
    "decode": "the workers' decode time is used up",
    "kv": "the workers' KV memory is used up",
}


class Drain(NamedTuple):
    """When requests of one kind would be admitted, as found at ``asked_s``."""

    asked_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A case that does not fit.

    Args:
        short: the budgets that have no room for it, in the order of a request's life.
        over: those of them that are over for all of its group, and stay so until they are left.
        enter, leave: loads, its share taken in.
        drains: what was found lately; kept by whoever judges.
    """

    case: Case
    policy: Policy
    short: Sequence[Shortage]
    over: frozenset[Shortage]
    enter: float
    leave: float
    drains: dict[Hashable, Drain]

    @property
    def shortage(self) -> Shortage:
        """What it is told."""
        return self.short[0]

    def drain_s(self) -> float | None:
        """When it would be admitted: what is over must be left, the rest not be entered. What was
        found for one like it a moment ago counts: in a crowd looking costs more than it tells."""
        ask = self.case.ask
        likeness = (
            ask.served, ask.tenant, ask.slo, self.enter, self.over, ask.num_prompt.bit_length(),
        )  # fmt: skip
        found = self.drains.get(likeness)
        if found is None or not found.asked_s <= ask.now_s < min(
            found.asked_s + DRAIN_KEPT_S, found.until_s
        ):
            drain_s = self.case.drain_s(dict.fromkeys(self.over, self.leave), self.enter)
            if drain_s is None:
                return None
            if len(self.drains) >= _MAX_DRAINS:
                self.drains.clear()
            found = self.drains[likeness] = Drain(ask.now_s, ask.now_s + drain_s)
        return found.until_s - ask.now_s


def degrade(over: Overload) -> Verdict:
    """The first rung that holds."""
    for rung in over.policy.rungs:
        found = _RUNGS[rung](over)
        if found is not None:
            return found
    return _refuse(over)


def degrade_unreachable(ask: Ask, policy: Policy, shortage: Shortage) -> Verdict:
    """Of a request whose times no idle worker could keep: only another model can help."""
    if "fallback" in policy.rungs and policy.fallback and not ask.asked_model:
        return Fallback(model=policy.fallback, shortage=shortage)
    return Refuse(
        retry_after_s=None,
        reason="no worker could keep the times asked for, had it nothing else to do",
        shortage=shortage,
    )


def error_of(refused: Refuse, served: str) -> MeshError:
    """What the client is told."""
    model, _ = subjects.split_served(served)
    if refused.retry_after_s is None:
        field = "slo.ttft_ms" if refused.shortage == "ttft" else "slo.tbt_ms"
        return SloUnreachable(f"{model}: {refused.reason}", param=field)
    return OverBudget(
        f"{model} is over its compute budget: {refused.reason}; "
        f"try again in {refused.retry_after_s:.3g} s",
        param="model",
        retry_after_s=refused.retry_after_s,
    )


def _wait(over: Overload) -> Verdict | None:
    ask = over.case.ask
    drain_s = over.drain_s()
    pause_s = UNKNOWN_S if drain_s is None else drain_s
    if ask.now_s + pause_s - ask.since_s > over.policy.max_wait_s:
        return None
    return Wait(until_s=ask.now_s + pause_s, shortage=over.shortage)


def _clamp(over: Overload) -> Verdict | None:
    """The most tokens that there is room for, with which a budget that is over would be left. At
    least the floor, which holds while nothing is entered."""
    ask = over.case.ask
    floor = max(over.policy.clamp_floor * ask.num_choices, ask.min_tokens)
    if floor >= ask.max_tokens or not _CLAMPED.issuperset(over.short):
        return None
    if not _fits(over, floor, over.enter):
        return None
    limit = over.leave if over.over else over.enter
    low, high = floor, ask.max_tokens - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(over, middle, limit):
            low = middle
        else:
            high = middle - 1
    return Clamp(max_tokens=low, shortage=over.shortage, forecast=over.case.forecasted)


def _fits(over: Overload, max_tokens: int, limit: float) -> bool:
    return all(reading.own <= limit for reading in over.case.readings(0.0, max_tokens))


def _fallback(over: Overload) -> Verdict | None:
    if not over.policy.fallback or over.case.ask.asked_model:
        return None  # it is one already, and one step is enough
    return Fallback(model=over.policy.fallback, shortage=over.shortage)


def _refuse(over: Overload) -> Verdict:
    drain_s = over.drain_s()
    return Refuse(
        retry_after_s=UNKNOWN_S if drain_s is None else drain_s,
        reason=_WORDS[over.shortage],
        shortage=over.shortage,
    )


_RUNGS: dict[Rung, Callable[[Overload], Verdict | None]] = {
    "wait": _wait,
    "clamp": _clamp,
    "fallback": _fallback,
    "refuse": _refuse,
}
