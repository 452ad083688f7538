"""Virtual time: what happens next, and when. Nothing here waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeVarTuple, Unpack

Args = TypeVarTuple("Args")


class EventQueue:
    """Calls in the order of their time; of one moment, in the order in which they were asked for.

    So a run is the same each time, whatever the machine does.

    Attributes:
        now_s: the moment of the call that runs, in seconds from the start.
        num_events: calls that were made.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._order = count()
        self._heap: list[tuple[float, int, Callable[[], object]]] = []

    def clock(self) -> float:
        """The moment, for code that wants a clock."""
        return self.now_s

    def at(self, time_s: float, call: Callable[[Unpack[Args]], object], *args: *Args) -> None:
        """Call it then; what is past already happens now, but after this call."""
        event = (max(time_s, self.now_s), next(self._order), _bound(call, args))
        heapq.heappush(self._heap, event)

    def after(self, delay_s: float, call: Callable[[Unpack[Args]], object], *args: *Args) -> None:
        """Call it so much later."""
        self.at(self.now_s + delay_s, call, *args)

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        """Make calls until it ``is_over``, nothing is left, or the time has come."""
        heap = self._heap
        while heap and not is_over():
            if heap[0][0] > until_s:
                self.now_s = until_s
                return
            self.now_s, _, call = heapq.heappop(heap)
            self.num_events += 1
            call()


def _bound(call: Callable[..., object], args: tuple[object, ...]) -> Callable[[], object]:
    return (lambda: call(*args)) if args else call
