"""Work that is said without the queue: the queue's own message, on its direct subject.

Nobody stores it, so nothing is lost with it only as long as nothing was promised for it. Whoever
hears it and can't take it puts it into the queue; whoever said it does, when nothing comes of it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable

from infra.bus.connection import Bus, Msg
from infra.bus.message import NO_HEADERS, Delivery
from infra.bus.pull import WorkMessage
from schemas import subjects
from schemas.errors import BusUnavailable, MeshError
from schemas.headers import MSG_ID

BeforeQueue = Callable[[bytes], Awaitable[None]]

_numbers = itertools.count(secrets.randbits(62))  # dead letters of two processes differ


class DirectMessage(WorkMessage):
    """One message that came directly, as a stage sees its messages: its subject is the queue's.
    Nothing waits for its ack; to give it back is to put it into the queue.

    Args:
        before_queue: called with its data first then: what else is to be stored before.
    """

    __slots__ = ("_before_queue",)

    def __init__(self, bus: Bus, message: Msg, before_queue: BeforeQueue | None = None) -> None:
        self._bus = bus
        self._before_queue = before_queue
        self._reply = message.reply
        self.subject = subjects.queued(message.subject)
        self.headers = message.headers or NO_HEADERS
        self.data = message.data
        self.delivery = Delivery(0, -next(_numbers), 0, 0, 0)

    def answer(self, data: bytes) -> None:
        """Tell who said it, if an answer was asked for. BusUnavailable when away."""
        if self._reply:
            self._bus.say(self._reply, data)

    async def ack(self) -> None:
        """Nothing waits for it."""

    async def ack_sync(self) -> None:
        """Nothing waits for it."""

    async def in_progress(self) -> None:
        """Nothing waits for it."""

    async def term(self, reason: str) -> None:
        """Nothing waits for it."""

    async def nak(self, delay_s: float = 0.0) -> None:
        """Put it into the queue, at once.

        Raises:
            BusUnavailable: not stored, for the broker is away, the queue is full, or its headers
                are none that we would write: left to who said it.
        """
        try:
            if self._before_queue is not None:
                await self._before_queue(self.data)
            await self._bus.publish_stored(
                self.subject, self.data, self.headers, msg_id=self.headers.get(MSG_ID)
            )
        except MeshError as error:
            raise BusUnavailable(error.message) from error
