"""Who still reads what bridges submitted. Pure: what is heard and the time are passed in.

A request of a bridge has a reader while that bridge lives, or while any bridge says that it reads
it (``Adopt``). Both are said again with every beat, so all that has to be known is when something
was last heard: a request is abandoned when nothing was for the whole resume window. Requests of
direct clients are never judged: they send no beats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol, TypeVar

from schemas import subjects
from schemas.control import Adopt, Beat

ABANDONED = "its bridge is gone and nobody resumed it"  # why such a request is cancelled


class Request(Protocol):
    """What is judged: a holding, or a task that waits."""

    @property
    def request_id(self) -> str:
        """Whose id."""

    @property
    def reader(self) -> str:
        """Whom it was submitted for."""


R = TypeVar("R", bound=Request)


class Adoptions:
    """When which request was last said to be read by a bridge that did not submit it."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # by request

    def __len__(self) -> int:
        return len(self._heard_s)

    def hear(self, request_ids: Iterable[str], now_s: float) -> None:
        """Somebody reads these."""
        for request_id in request_ids:
            self._heard_s[request_id] = now_s

    def last_s(self, request_id: str) -> float:
        """When that was last heard of this request; minus infinity: never, or too long ago."""
        return self._heard_s.get(request_id, -math.inf)

    def forget(self, older_than_s: float) -> None:
        """Drop what was last heard before ``older_than_s``."""
        self._heard_s = {r: s for r, s in self._heard_s.items() if s >= older_than_s}


class Attendance:
    """One listener's roll of bridges and adoptions.

    Args:
        window_s: how long a request runs on without anybody to read it.
        now_s: when this listener began to listen (monotonic): what it can't have heard before
            counts from then.
    """

    def __init__(self, window_s: float, now_s: float) -> None:
        self._window_s = window_s
        self._listening_since_s = now_s
        self._bridges: dict[str, float] = {}  # process -> when it was last heard
        self._adoptions = Adoptions()

    def hear_beat(self, beat: Beat, now_s: float) -> None:
        """A heartbeat of any process; a last one ("gone") counts as well."""
        if beat.kind == "bridge":
            self._bridges[beat.process] = now_s

    def hear_adopt(self, adopt: Adopt, now_s: float) -> None:
        """A bridge says what it reads for others."""
        self._adoptions.hear(adopt.request_ids, now_s)

    def listen_anew(self, now_s: float) -> None:
        """The listener was away: all that it did not hear counts from now."""
        self._listening_since_s = now_s

    def abandoned(self, requests: Iterable[R], now_s: float) -> list[R]:
        """Those of ``requests`` that nobody reads any more."""
        before_s = now_s - self._window_s
        if self._listening_since_s >= before_s:
            return []
        return [one for one in requests if self._last_s(one) < before_s]

    def _last_s(self, request: Request) -> float:
        bridge = subjects.bridge_of(request.reader)
        if bridge is None:
            return math.inf
        return max(self._bridges.get(bridge, -math.inf), self._adoptions.last_s(request.request_id))

    def forget(self, now_s: float) -> None:
        """Drop what is older than the window: it says no more than silence does."""
        before_s = now_s - self._window_s
        self._adoptions.forget(before_s)
        self._bridges = {b: s for b, s in self._bridges.items() if s >= before_s}
