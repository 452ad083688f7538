"""The broker's time: deadlines are in it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from infra.bus.errors import BrokerRefused
from infra.bus.message import parse_time_ms
from infra.bus.names import DEAD

_STREAM_NOT_FOUND = 10059
# Any stream's info carries the broker's time; this one's says nothing of anybody's requests.
_QUESTION = f"STREAM.INFO.{DEAD}"


class BrokerClock:
    """Asked from time to time; the monotonic clock counts in between.

    Args:
        ask: as ``Link.api``.
    """

    def __init__(self, ask: Callable[[str], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask
        self._ahead_ms = time.time() * 1000 - time.monotonic() * 1000  # until it is known

    def now_unix_ms(self) -> int:
        """Milliseconds since 1970, as the broker counts them."""
        return int(time.monotonic() * 1000 + self._ahead_ms)

    async def sync(self) -> None:
        """Take the broker's time anew. Before the topology exists the local clock stands in.

        Raises:
            BusUnavailable: no answer.
        """
        before_ms = time.monotonic() * 1000
        try:
            answer = await self._ask(_QUESTION)
        except BrokerRefused as error:
            if error.err_code != _STREAM_NOT_FOUND:
                raise
            return
        middle_ms = (before_ms + time.monotonic() * 1000) / 2
        self._ahead_ms = parse_time_ms(answer["ts"]) - middle_ms
