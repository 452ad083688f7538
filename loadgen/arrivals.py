"""When requests are due in an open loop: offsets from the start, whatever the server does.

Arrivals are made in two steps: gaps of mean one, whose spread says how bursty they are, then a
change of clock that gives them the rate of the moment. So a ramp is as bursty as a constant rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Requests per second: from ``start`` evenly to ``end`` within ``over_s``, then ``end``.

    Raises:
        ValueError: a rate that is not positive and finite, or a ramp that takes no time.
    """

    start: float
    end: float
    over_s: float = 0.0

    def __post_init__(self) -> None:
        for rate in (self.start, self.end):
            if not (rate > 0 and math.isfinite(rate)):
                raise ValueError(f"rate is {rate}, it must be positive and finite")
        if self.start != self.end and not (self.over_s > 0 and math.isfinite(self.over_s)):
            raise ValueError(f"a ramp over {self.over_s} s is none")

    @classmethod
    def constant(cls, rate: float) -> Rate:
        """The same rate all the time."""
        return cls(start=rate, end=rate)

    def time_of(self, count: float) -> float:
        """When so many requests are due on average: the inverse of the rate's integral."""
        slope = (self.end - self.start) / self.over_s if self.over_s else 0.0
        in_ramp = (self.start + self.end) / 2 * self.over_s
        if slope == 0.0 or count >= in_ramp:
            return self.over_s + (count - in_ramp) / self.end
        # start * t + slope / 2 * t^2 = count, in the form that does not cancel
        root = math.sqrt(self.start**2 + 2 * slope * count)
        return 2 * count / (self.start + root)


def arrivals(rate: Rate, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Ascending offsets in seconds, without end.

    Gaps are of a gamma distribution with shape ``burstiness``: 1 is a Poisson process, less comes
    in bursts (the gaps' deviation is ``1 / sqrt(burstiness)`` of their mean), more is smoother,
    infinity is a clock. The meaning is that of ``vllm bench serve --burstiness``.

    Raises:
        ValueError: ``burstiness`` is not positive (at the first value).
    """
    if not burstiness > 0:
        raise ValueError(f"burstiness is {burstiness}, it must be positive")
    count = 0.0
    while True:
        if math.isinf(burstiness):
            count += 1.0
        else:
            count += rng.gammavariate(burstiness, 1.0 / burstiness)
        yield rate.time_of(count)
