"""When requests are due in an open loop: offsets from the start, whatever the server does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Ascending offsets in seconds of a Poisson process with ``rate`` arrivals per second.

    Endless; the gaps are independent and exponential with mean ``1 / rate``.

    Raises:
        ValueError: ``rate`` is not a positive, finite number (at the first value).
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate is {rate}, it must be positive and finite")
    offset_s = 0.0
    while True:
        offset_s += rng.expovariate(rate)
        yield offset_s
