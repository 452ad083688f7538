"""Whether a pool serves one kind of requests or several. Pure: the time is passed in.

A kind is what the fair order tells apart: a tenant, and a priority. While there is only one, it
does not matter in which order its requests lie in a worker's queue; when another one may come, what
lies there is before it.
"""

from __future__ import annotations

import math

COMPANY_S = 30.0  # after so long without a request a kind is not expected to come again

Kind = tuple[str, int]  # tenant and priority


class Company:
    """Who has asked one pool lately: the last one, and when anybody else did."""

    def __init__(self) -> None:
        self._last: Kind | None = None
        self._last_s = -math.inf
        self._other_s = -math.inf

    def come(self, kind: Kind, now_s: float) -> None:
        """A request of this kind came, or came back."""
        if self._last is not None and kind != self._last:
            self._other_s = self._last_s
        self._last, self._last_s = kind, now_s

    def is_mixed(self, now_s: float) -> bool:
        """Whether requests of two kinds or more came within the last ``COMPANY_S``."""
        return now_s - self._other_s <= COMPANY_S
