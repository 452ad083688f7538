"""Callables timed by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

LEAST_TURNS = 3


class Turns:
    """Steps that are timed by turns, in one round or several with something else between them.

    In a round they run one after the other, after one turn that is not counted, each until it has
    had ``num_turns`` turns and ``least_s`` seconds: of what takes little time many are counted, or
    a moment in which the machine is slow would make all of a figure. One that has had three turns
    and more than ``budget_s`` seconds, rounds before included, is left out of the rest.
    """

    def __init__(
        self,
        steps: Mapping[str, Callable[[], object]],
        *,
        num_turns: int,
        budget_s: float,
        least_s: float = 0.0,
    ) -> None:
        self._steps = steps
        self._num_turns = num_turns
        self._budget_s = budget_s
        self._least_s = least_s
        self._times_s: dict[str, list[float]] = {name: [] for name in steps}

    def run_round(self) -> None:
        """Time each step some more."""
        for step in self._steps.values():
            step()
        first = {name: len(taken) for name, taken in self._times_s.items()}
        while wanting := [name for name in self._steps if self._wants_more(name, first[name])]:
            for name in wanting:
                step = self._steps[name]
                started_s = time.perf_counter()
                step()
                self._times_s[name].append(time.perf_counter() - started_s)

    def median_ms(self) -> dict[str, float]:
        """The median time of each step over all rounds, in milliseconds."""
        return {name: statistics.median(taken) * 1e3 for name, taken in self._times_s.items()}

    def _wants_more(self, name: str, first: int) -> bool:
        """``first``: where this round begins in its times."""
        taken = self._times_s[name]
        if len(taken) >= LEAST_TURNS and sum(taken) > self._budget_s:
            return False
        of_round = taken[first:]
        return len(of_round) < self._num_turns or sum(of_round) < self._least_s


def median_ms(
    steps: Mapping[str, Callable[[], object]], *, num_turns: int, budget_s: float
) -> dict[str, float]:
    """The median time of each step in one round, in milliseconds."""
    turns = Turns(steps, num_turns=num_turns, budget_s=budget_s)
    turns.run_round()
    return turns.median_ms()
