"""What routers tell each other: whom they gave a request to, before that worker can say so.

Consumes   mesh.v1.placed.<process>      Placed, of the other routers
Publishes  mesh.v1.placed.<process>      Placed, our own, while another router is there
Keeps      nothing but whether one is; whoever predicts has the rest
Fails      a word that is lost, or that nobody was there to hear: the worker's next beat tells
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from infra.bus import Bus, Msg
from infra.log import Logger
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Placed
from schemas.errors import MeshError, SchemaError

_MAX_UNSAID = 1024  # while the bus is away; older ones are of no use by then


class PlacedFeed:
    """Says what this process places, and hears what others do.

    Attributes:
        has_others: whether anybody is there to be told; set by whoever knows the fleet.

    Args:
        hear: called with what others place, and when it was heard.
    """

    def __init__(
        self, bus: Bus, hear: Callable[[Placed, float], None], process: str, log: Logger
    ) -> None:
        self.has_others = True
        self._bus = bus
        self._tell = hear
        self._subject = subjects.placed(process)
        self._log = log
        self._unsaid: asyncio.Queue[Placed] = asyncio.Queue(_MAX_UNSAID)

    def say(self, placed: Placed) -> None:
        """Tell the others, if there are any, soon: nobody waits for it. With too many unsaid the
        oldest is left out."""
        if not self.has_others:
            return
        if self._unsaid.full():
            self._unsaid.get_nowait()
        self._unsaid.put_nowait(placed)

    async def run(self) -> None:
        """Say and hear until cancelled."""
        words = await self._bus.subscribe(subjects.ALL_PLACED, self._hear)
        try:
            while True:
                placed = await self._unsaid.get()
                try:
                    await self._bus.publish(self._subject, encode(placed))
                except MeshError as error:
                    self._log.info("placed_not_said", code=error.code, reason=error.message)
        finally:
            await words.unsubscribe()

    def _hear(self, message: Msg) -> None:
        if message.subject == self._subject:
            return  # our own, which the broker gives back to us
        try:
            placed = decode(message.data, Placed)
        except SchemaError as error:
            self._log.warning("placed_refused", subject=message.subject, reason=error.message)
            return
        self._tell(placed, time.monotonic())
