"""Callables timed by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

LEAST_TURNS = 3


def median_ms(
    steps: Mapping[str, Callable[[], object]], *, num_turns: int, budget_s: float
) -> dict[str, float]:
    """The median time of each step, in milliseconds.

    They run one after the other, ``num_turns`` times, after one turn that is not counted. One that
    has had three turns and more than ``budget_s`` seconds is left out of the rest.
    """
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(num_turns):
        for name, step in steps.items():
            taken = times_s[name]
            if len(taken) >= LEAST_TURNS and sum(taken) > budget_s:
                continue
            started_s = time.perf_counter()
            step()
            taken.append(time.perf_counter() - started_s)
    return {name: statistics.median(taken) * 1e3 for name, taken in times_s.items()}
