"""How fast this worker computes and copies blocks, as it was seen to lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_KEPT = 0.9  # of what was measured, with each new measurement: the last ten or so count
_FEWEST_TOKENS = 32  # a step of less is no prefill


class Rate:
    """Seconds per thing, old measurements fading. One thread notes, any thread reads."""

    def __init__(self) -> None:
        self._sums = (0.0, 0.0)  # things, seconds

    def note(self, count: int, seconds: float) -> None:
        """``count`` things took so long."""
        things, before_s = self._sums
        self._sums = (things * _KEPT + count, before_s * _KEPT + seconds)

    @property
    def seconds_each(self) -> float | None:
        """None: nothing was measured."""
        things, seconds = self._sums
        return seconds / things if things else None


class Pace:
    """Measured speeds of one engine and of the copies beside it.

    Attributes:
        prefill: seconds per token of steps that are mostly prefill.
        promotion: seconds per block from the host tier, checksum included.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.prefill = Rate()
        self.promotion = Rate()

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Around a step that computes so many tokens."""
        started_s = self.clock()
        yield
        if num_tokens >= _FEWEST_TOKENS:
            self.prefill.note(num_tokens, self.clock() - started_s)

    def is_copying_faster(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether so many blocks are copied before so many tokens are computed; as long as one
        of the two was never measured: yes, for that measures it."""
        copy_s, compute_s = self.promotion.seconds_each, self.prefill.seconds_each
        if copy_s is None or compute_s is None:
            return True
        return copy_s * num_blocks < compute_s * num_tokens
