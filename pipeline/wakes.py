"""When readers hear of new tokens: at once while there are few, together when there are many.

What a woken reader does for a token, mostly one write to a socket, costs many times what the token
itself does, and two tokens in one write cost what one does. So the readers of one process are woken
in rounds, and after each round there is a rest of ``REST`` times what it took::

    | round, t |           rest, 7 t           | round | rest ...
      tokens that come in a rest leave together in the next round

So writing takes an eighth of the time of a process at most, until rests are ``LONGEST_S`` long: no
token waits longer than that. An engine's steps are longer, as a rule, than the rest after a few
streams, and nothing waits. A first token never does, nor an end. An answer's last tokens are put
off by another ``LONGEST_S`` to twice that: as a rule its end comes meanwhile, wakes their reader,
and leaves with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

REST = 7.0
LONGEST_S = 0.01

Wake = Callable[[], None]


class Wakes:
    """Calls each of those that were added, once, in the next round."""

    def __init__(self) -> None:
        self._ripe: dict[Wake, None] = {}
        self._is_due = False
        self._next_s = 0.0  # when the rest ends, in the loop's time
        self._began_s = 0.0
        self._put_off: dict[Wake, None] = {}  # since the last look at these
        self._overdue: dict[Wake, None] = {}  # since the one before

    def add(self, wake: Wake) -> None:
        """Call ``wake`` in the next round; it is to set something that a task waits for."""
        self._ripe[wake] = None
        if not self._is_due:
            self._set()

    def put_off(self, wake: Wake) -> None:
        """Call ``wake`` in ``LONGEST_S``, or up to twice that: for who hopes to be woken before."""
        if not (self._put_off or self._overdue):
            self._look_later()
        self._put_off[wake] = None

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(LONGEST_S, self._look)

    def _look(self) -> None:
        late, self._overdue, self._put_off = self._overdue, self._put_off, {}
        if self._overdue:
            self._look_later()
        for wake in late:
            self.add(wake)

    def _set(self) -> None:
        self._is_due = True
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_s:
            loop.call_soon(self._wake_all)
        else:
            loop.call_at(self._next_s, self._wake_all)

    def _wake_all(self) -> None:
        ripe, self._ripe = self._ripe, {}
        self._began_s = time.perf_counter()
        try:
            for wake in ripe:
                wake()
        finally:  # behind all tasks that were woken
            asyncio.get_running_loop().call_soon(self._rest)

    def _rest(self) -> None:
        took_s = time.perf_counter() - self._began_s
        loop = asyncio.get_running_loop()
        self._next_s = loop.time() + min(REST * took_s, LONGEST_S)
        self._is_due = False
        if self._ripe:  # added in the round, for the next one
            self._set()
