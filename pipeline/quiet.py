"""Silence: when something that waits has heard nothing for a while, ask whether it was missed.

One timer for all who wait, however many: ten thousand requests that are queued cost what one does.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

QUIET_S = 1.0  # silence after which somebody who waits has it asked


class QuietWatch:
    """Calls ``check`` when whoever waits longest has waited ``QUIET_S``, and then once in each.

    Args:
        check: returns at once.
    """

    def __init__(self, check: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self._check = check
        self._loop = loop
        self._since_s: dict[object, float] = {}  # who waits; the longest first
        self._checked_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._since_s)

    def begin(self, who: object) -> None:
        """``who`` waits from now on."""
        self._since_s[who] = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._due_s, self._look)

    def end(self, who: object) -> None:
        """``who`` heard something, or waits no more."""
        self._since_s.pop(who, None)

    def again(self, who: object) -> None:
        """``who`` heard something; if it waited, it waits on."""
        if self._since_s.pop(who, None) is not None:
            self._since_s[who] = self._loop.time()

    @property
    def _due_s(self) -> float:
        return max(next(iter(self._since_s.values())), self._checked_s) + QUIET_S

    def _look(self) -> None:
        self._timer = None
        if not self._since_s:
            return
        if self._loop.time() >= self._due_s:
            self._checked_s = self._loop.time()
            self._check()
        self._timer = self._loop.call_at(self._due_s, self._look)
