"""A limit per minute as a level that drains. Pure: the time is passed in.

Every charge raises the level; it falls by ``limit`` per minute, evenly. A charge fits while it does
not raise the level above ``limit``. So between any two moments ``T`` seconds apart no more than
``limit * (1 + T / 60)`` is charged (what is given back taken off), and an idle key may use a whole
minute's worth at once. A sliding window would need the time of every charge; this is two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE_S = 60.0
# Levels are sums of whole numbers minus drained fractions: rounding may hold a charge back that
# fits exactly now, which would make the announced time a lie.
_ROUNDING = 1e-6


@dataclass(slots=True)
class Bucket:
    """The level at a moment; both numbers are all that must be kept."""

    level: float = 0.0
    at_s: float = 0.0

    def drain(self, limit: int, now_s: float) -> None:
        """Let the level fall to what it is at ``now_s``; a time in the past changes nothing."""
        passed_s = now_s - self.at_s
        if passed_s > 0:
            self.level = max(0.0, self.level - passed_s * limit / _MINUTE_S)
            self.at_s = now_s

    def fits(self, amount: int, limit: int) -> bool:
        """Whether ``amount`` may be charged now (drain first)."""
        return self.level + amount <= limit + _ROUNDING

    def wait_s(self, amount: int, limit: int) -> float | None:
        """Until when ``amount`` fits, if nothing else happens; None: never."""
        if amount > limit:
            return None
        over = self.level + amount - limit
        return max(0.0, over * _MINUTE_S / limit)

    def charge(self, amount: int) -> None:
        """Raise the level, above the limit if need be (what was used is owed); a negative amount
        is given back."""
        self.level = max(0.0, self.level + amount)

    def remaining(self, limit: int) -> int:
        """What would fit now."""
        return max(0, int(limit - self.level + _ROUNDING))

    def reset_s(self, limit: int) -> float:
        """Until when the whole limit is there again, if nothing else happens."""
        return self.level * _MINUTE_S / limit

    def check_invariants(self) -> None:
        """No credit beyond the limit exists."""
        assert self.level >= 0.0, f"a level of {self.level}"
