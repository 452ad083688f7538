"""How fast this worker computes and copies blocks, as it was seen to lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_KEPT = 0.9  # of what was measured, with each new measurement: the last ten or so count
_FEWEST_TOKENS = 32  # a step of less is no prefill
_TOKEN_S = 5e-4  # before anything is measured: a large CPU or a small GPU


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


class PrefillSpeed:
    """How long a prompt's positions take to compute, learned from steps that computed some.

    The model is ``a + b * context`` per token, ``context`` being how many stand before it: the
    linear and the attention part of a transformer. Least squares, the newest steps count most.
    One thread observes, any thread asks.
    """

    def __init__(self, token_s: float = _TOKEN_S) -> None:
        # Sums of 1, x, x * x, y and x * y: x the mean context of a step, y its seconds per token.
        self._sums = (1.0, 0.0, 0.0, token_s, 0.0)
        self.is_measured = False

    def observe(self, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """The positions ``[start, end)`` of each of ``chunks`` were computed together in so long.

        Nothing is learned from a few: what a step costs whatever it computes would count as theirs.
        """
        num_tokens = sum(end - start for start, end in chunks)
        if num_tokens < _FEWEST_TOKENS:
            return
        x = sum(_contexts(start, end) for start, end in chunks) / num_tokens
        y = seconds / num_tokens
        seen = (1.0, x, x * x, y, x * y)
        kept = zip(self._sums, seen, strict=True)
        self._sums = tuple(_KEPT * old + new for old, new in kept)  # type: ignore[assignment]
        self.is_measured = True

    def seconds(self, start: int, end: int) -> float:
        """How long ``[start, end)`` will take."""
        if end <= start:
            return 0.0
        a, b = self._fit()
        return a * (end - start) + b * _contexts(start, end)

    def _fit(self) -> tuple[float, float]:
        """Neither part is negative; of steps that are all alike, all is linear."""
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        if spread <= 0.01 * x * x:
            return y / n, 0.0
        b = (n * xy - x * y) / spread
        a = (y - b * x) / n
        if a < 0:
            return 0.0, y / x
        return (a, b) if b >= 0 else (y / n, 0.0)


def _contexts(start: int, end: int) -> float:
    """Tokens before each of these positions, added up."""
    return (end - start) * (start + end - 1) / 2


class Pace:
    """Measured speeds of one engine and of the copies beside it.

    Attributes:
        prefill: how long positions of prompts take.
        promotion: seconds per block from the host tier, checksum included.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.prefill = PrefillSpeed()
        self.promotion = Rate()

    def is_copying_faster(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether so many blocks are copied before so many tokens are computed; as long as one
        of the two was never measured: yes, for that measures it."""
        copy_s = self.promotion.seconds_each
        if copy_s is None or not self.prefill.is_measured:
            return True
        return copy_s * num_blocks < self.prefill.seconds(0, num_tokens)
