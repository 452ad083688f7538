"""What one model promises, and what becomes of requests that its workers have no room for. Pure.

Times are promised by *classes*; over budget the *rungs* are tried in order until one holds. A
budget is over when its load passes ``enter``, and stays so until it is at or under ``leave``: what
is degraded does not change with every request. Of both, a request of low priority may use only its
share, so that it is the first to be degraded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol

from schemas.errors import InvalidRequest
from schemas.requests import Slo

Rung = Literal["wait", "clamp", "fallback", "refuse"]
RUNGS: tuple[Rung, ...] = ("wait", "clamp", "fallback", "refuse")
MAX_SLO_MS = 3_600_000.0
_NO_CLASSES: Mapping[str, Slo] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One model's.

    Args:
        classes: what each promises. A request that names neither a class nor times gets
            ``default_class``; "" promises nothing, and is never over budget.
        rungs: what is tried over budget; refusing is behind the last one in any case.
        max_wait_s: the longest that a request waits for room.
        clamp_floor: tokens of each choice that a clamp leaves at least.
        fallback: the model that answers instead.
        horizon_s: the decode budget is what the workers can do within this time, or the TTFT
            target where that is longer.
        shares: (priority, share), rising: requests of this priority and less may use this share
            of the budget; those above the last may use all of it.
    """

    classes: Mapping[str, Slo] = field(default_factory=lambda: _NO_CLASSES)
    default_class: str = ""
    rungs: tuple[Rung, ...] = ("refuse",)
    max_wait_s: float = 10.0
    clamp_floor: int = 64
    fallback: str = ""
    enter: float = 1.0
    leave: float = 0.8
    horizon_s: float = 30.0
    shares: tuple[tuple[int, float], ...] = ()

    def share_of(self, priority: int) -> float:
        """How much of the budget a request of ``priority`` may use: over 0, at most 1."""
        return next((share for below, share in self.shares if priority <= below), 1.0)

    @property
    def default_slo(self) -> Slo:
        """That of requests which ask for nothing."""
        return self.slo_of(Slo())

    def slo_of(self, asked: Slo) -> Slo:
        """The times that a request is to be served in: its own, else its class's.

        Raises:
            InvalidRequest: there is no such class, or a time is out of range.
        """
        check_slo(asked)
        name = asked.name or ("" if asked.ttft_ms or asked.tbt_ms else self.default_class)
        if not name:
            return asked
        found = self.classes.get(name)
        if found is None:
            known = ", ".join(sorted(self.classes)) or "none"
            raise InvalidRequest(
                f"this model has no SLO class {name[:64]!r}; it has: {known}", param="slo.name"
            )
        return Slo(
            ttft_ms=asked.ttft_ms or found.ttft_ms,
            tbt_ms=asked.tbt_ms or found.tbt_ms,
            name=name,
        )


DEFAULT_POLICY = Policy()


class Policies(Protocol):
    """Where a model's policy is found; it may be another one with the next call."""

    def of(self, model: str) -> Policy:
        """The policy of ``model``: its own, else that of ``*``, else one that promises nothing."""


@dataclass(frozen=True, slots=True)
class FixedPolicies:
    """Policies that never change: of tests and simulations, and what a file says."""

    by_model: Mapping[str, Policy] = field(default_factory=dict)

    def of(self, model: str) -> Policy:
        """See :class:`Policies`."""
        return self.by_model.get(model) or self.by_model.get("*") or DEFAULT_POLICY


def check_slo(asked: Slo) -> None:
    """Raise InvalidRequest, naming the field, when a time is no time."""
    for name in ("ttft_ms", "tbt_ms"):
        value = getattr(asked, name)
        if not 0 <= value <= MAX_SLO_MS:  # NaN is in no range
            raise InvalidRequest(
                f"{name} must be from 0 to {MAX_SLO_MS:g} milliseconds, not {value:g}",
                param=f"slo.{name}",
            )
