"""Taking work: a pull loop that asks for as many messages as there is room for now.

``credit`` is how many we asked for and have not seen. A pull lives for ``pull_expiry_s`` at most,
so that a frozen process keeps messages of a shared queue from others for no longer than that, and
so that silence is noticed within three of them without heartbeats. Pulls end together, at the pulse
(``infra/pulse.py``): a process at rest asks again for all its queues when it wakes for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from nats.js.api import ConsumerConfig

from infra.bus.connection import Bus, Msg
from infra.bus.message import NO_HEADERS, Delivery
from infra.bus.names import WORK
from infra.bus.topology import ensure_consumer
from infra.pulse import until_next_s
from schemas.errors import BusUnavailable

_CREATE_RETRY_S = 0.05

log = structlog.get_logger("bus")


class WorkMessage:
    """One delivered work message. Exactly one of ack, nak and term ends it."""

    __slots__ = ("_bus", "_reply", "data", "delivery", "headers", "subject")

    def __init__(self, bus: Bus, message: Msg) -> None:
        self._bus = bus
        self._reply = message.reply
        self.subject = message.subject
        self.headers = message.headers or NO_HEADERS
        self.data = message.data
        self.delivery = Delivery.of(message.reply)

    @property
    def num_delivered(self) -> int:
        """1 at first. The count starts anew when the consumer was lost or reaped."""
        return self.delivery.num_delivered

    @property
    def stream_seq(self) -> int:
        """Its place in the work stream: the same for every delivery."""
        return self.delivery.stream_seq

    async def ack(self) -> None:
        """Done. Lost acks bring the message back. BusUnavailable when away."""
        await self._bus.publish(self._reply)

    async def ack_sync(self) -> None:
        """Done, and the broker knows.

        Raises:
            NobodyListens: the consumer is gone: somebody else has or will get the message.
            BusUnavailable: not confirmed.
        """
        await self._bus.request(self._reply)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back, to be delivered again after ``delay_s``. BusUnavailable when away."""
        delay = f'{{"delay": {int(delay_s * 1e9)}}}' if delay_s else ""
        await self._bus.publish(self._reply, f"-NAK {delay}".strip().encode())

    async def in_progress(self) -> None:
        """Still at it: the ack clock starts anew. BusUnavailable when away."""
        await self._bus.publish(self._reply, b"+WPI")

    async def term(self, reason: str) -> None:
        """Never deliver it again. BusUnavailable when away."""
        await self._bus.publish(self._reply, f"+TERM {reason}".encode())


class WorkPull:
    """Pulls on one consumer.

    Args:
        config: the consumer; added at the start, and again when a restarted broker forgot it.
        on_message: takes a message and returns at once.
        free: how many more messages there is room for now, those already asked for not counted.
            After a broken connection a few more than that may come.
        on_fenced: our consumer was deleted under us: called once, and :meth:`run` returns. None for
            a shared consumer, which is added again.
    """

    def __init__(
        self,
        bus: Bus,
        config: ConsumerConfig,
        on_message: Callable[[WorkMessage], None],
        free: Callable[[], int],
        *,
        on_fenced: Callable[[], None] | None = None,
        stream: str = WORK,
    ) -> None:
        self._bus = bus
        self._config = config
        self._on_message = on_message
        self._free = free
        self._on_fenced = on_fenced
        self._stream = stream
        self._expiry_s = bus.times.pull_expiry_s
        self._inbox = bus.new_inbox()
        self._generation = 0  # of pulls; those of an older connection don't count
        self._credit = 0
        self._heard_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._awake = asyncio.Event()
        self._is_look_due = False
        self._is_stopping = False
        self._is_lost = True  # the consumer is not known to exist
        self._added_at = ""  # the broker process that has it
        self._given_back: list[WorkMessage] = []

    def poke(self) -> None:
        """There may be room again: ask without waiting for the next look. One look answers all
        that is said in one turn of the loop."""
        if not self._is_look_due:
            self._is_look_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_look_due = False
        if self._num_wanted:
            self._awake.set()

    def stop(self) -> None:
        """Ask for nothing more. :meth:`run` gives back what still comes, and returns."""
        self._is_stopping = True
        self._awake.set()

    async def run(self) -> None:
        """Pull until stopped or fenced; outages of the broker are waited out.

        Raises:
            BrokerRefused: the consumer can't be made as configured.
            BusForbidden: our user may not pull there.
        """
        subscription = await self._bus.subscribe(f"{self._inbox}.*", self._receive)
        self._bus.on_reconnected.append(self._start_over)
        try:
            while not (self._is_stopping and self._credit <= 0):
                if self._is_lost and not self._is_stopping and await self._is_fenced():
                    return
                self._awake.clear()
                await self._ask()
                await self._give_back()
                await self._until_something()
            await self._give_back()
        finally:
            self._bus.on_reconnected.remove(self._start_over)
            await subscription.unsubscribe()

    async def _until_something(self) -> None:
        """A pull that stands is answered at its end; without one, our own clock says when to look
        for room, or for the broker, again."""
        look_s = self._loop.time() + self._expiry_s
        if self._credit > 0 and not self._is_lost:
            look_s = max(look_s, self._heard_s + 3 * self._expiry_s)
        try:
            async with asyncio.timeout_at(look_s):
                await self._awake.wait()
        except TimeoutError:
            if self._credit > 0 and self._loop.time() - self._heard_s >= 3 * self._expiry_s:
                self._start_over()

    def _start_over(self) -> None:
        """What was asked before is forgotten: that pull is gone, or its answers are."""
        self._generation += 1
        self._credit = 0
        self._awake.set()

    async def _is_fenced(self) -> bool:
        """Add the consumer, unless this broker process had it: then it was taken from us.

        After a move to another server of a cluster the two can't be told apart, and it is added;
        claims decide anyhow.
        """
        if self._on_fenced is not None and self._added_at == self._bus.server_id:
            log.warning("work_pull_fenced", consumer=self._config.name)
            self._on_fenced()
            return True
        try:
            server = self._bus.server_id
            await ensure_consumer(self._bus, self._stream, self._config)
        except BusUnavailable:
            await self._bus.until_connected(self._expiry_s)
            await asyncio.sleep(_CREATE_RETRY_S)
            return False
        self._is_lost, self._added_at = False, server
        self._start_over()
        return False

    @property
    def _num_wanted(self) -> int:
        """How many to ask for now. While half of the room is asked for, a question per message
        brings nothing."""
        if self._is_lost or self._is_stopping or not self._bus.is_connected:
            return 0
        count = self._free() - self._credit
        return count if count > 0 and count >= self._credit else 0

    async def _ask(self) -> None:
        count = self._num_wanted
        if not count:
            return
        now_s = self._loop.time()
        if self._credit == 0:
            self._heard_s = now_s
        expiry_s = min(until_next_s(self._expiry_s, now_s), self._expiry_s)
        request = f'{{"batch": {count}, "expires": {int(expiry_s * 1e9)}}}'
        try:
            await self._bus.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._config.name}",
                request.encode(),
                reply=f"{self._inbox}.{self._generation}",
            )
        except BusUnavailable:
            return  # asked again once it is back
        self._credit += count

    def _receive(self, message: Msg) -> None:
        self._heard_s = self._loop.time()
        if message.reply:
            self._credit = max(0, self._credit - 1)
            self._take(WorkMessage(self._bus, message))
        elif message.subject == f"{self._inbox}.{self._generation}":
            self._hear_status(message.headers or {})
        if not self._credit or self._is_lost or self._is_stopping:
            self._awake.set()
        else:
            self.poke()

    def _take(self, message: WorkMessage) -> None:
        if self._is_stopping:
            self._given_back.append(message)
        else:
            self._on_message(message)

    def _hear_status(self, headers: dict[str, str]) -> None:
        status, description = headers.get("Status"), headers.get("Description", "")
        if status == "100":
            return
        # 404, 408, 409: one pull ended, so much of it unfilled.
        self._credit = max(0, self._credit - int(headers.get("Nats-Pending-Messages", "0")))
        if status == "503" or "Consumer Deleted" in description:
            self._is_lost, self._credit = True, 0

    async def _give_back(self) -> None:
        """With a pause: without one a message would come back to our own pull, while it lasts."""
        while self._given_back:
            try:
                await self._given_back[-1].nak(self._expiry_s)
            except BusUnavailable:
                pass  # it comes again by itself
            self._given_back.pop()
