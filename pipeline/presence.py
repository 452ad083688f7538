"""Whether this process heard the bus all the time: only then may it judge the silence of others.

Away is who did not run (stopped, or starved of the processor), whose connection broke, and who
hears nothing although the connection stands: a frozen broker shows only after seconds. What is
said to ourselves on the bus, twice per beat, and comes back tells these apart from silence.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from infra.bus import Bus, Msg
from infra.pulse import next_pulse
from schemas.errors import BusUnavailable


class Presence:
    """Listens to itself.

    Args:
        on_away: called with the monotonic time whenever we notice that we were, or are, away: what
            others said until then may have been missed.
    """

    def __init__(self, bus: Bus, on_away: Callable[[float], None]) -> None:
        self._bus = bus
        self._on_away = on_away
        self._limit_s = bus.times.dead_s / 2
        self._ran_s = self._heard_s = time.monotonic()

    async def run(self) -> None:
        """Speak, listen and look, until cancelled."""
        inbox = self._bus.new_inbox()
        subscription = await self._bus.subscribe(inbox, self._hear)
        try:
            while True:
                self.look()
                with contextlib.suppress(BusUnavailable):  # then we are away, and know it
                    await self._bus.publish(inbox)
                await next_pulse(self._bus.times.beat_s / 2)
        finally:
            await subscription.unsubscribe()

    def _hear(self, message: Msg) -> None:
        self._heard_s = time.monotonic()

    def look(self) -> None:
        """Notice an absence; to be called before each judgement, too."""
        now_s = time.monotonic()
        since_s = min(self._ran_s, self._heard_s)
        if now_s - since_s > self._limit_s or not self._bus.is_connected:
            self._on_away(now_s)
        self._ran_s = now_s
