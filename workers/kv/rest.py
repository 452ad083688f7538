"""A rest for what has failed. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable

from infra.log import Logger

FIRST_REST_S = 10.0
LONGEST_REST_S = 300.0


class Rest:
    """Whether one kind of work is left alone for a while: ten seconds after it failed, twice as
    long each time that it fails again. Logged when a rest begins after good times, and when they
    come back; not in between.

    Args:
        what: rests, for the log.
        now: seconds, monotonic.
    """

    def __init__(self, what: str, log: Logger, now: Callable[[], float]) -> None:
        self._what = what
        self._log = log
        self._now = now
        self._until_s = now()
        self._next_s = FIRST_REST_S

    @property
    def is_on(self) -> bool:
        """Whether it rests."""
        return self._now() < self._until_s

    def failed(self, reason: str) -> None:
        """It did not work."""
        if self._next_s == FIRST_REST_S:
            self._log.warning("kv_disk_rested", what=self._what, reason=reason, for_s=self._next_s)
        self._until_s = self._now() + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_REST_S)

    def worked(self) -> None:
        """It worked."""
        if self._next_s != FIRST_REST_S:
            self._next_s = FIRST_REST_S
            self._until_s = self._now()
            self._log.info("kv_disk_recovered", what=self._what)
