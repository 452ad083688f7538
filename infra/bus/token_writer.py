"""Writing token batches: fire, ask now and then, send again.

Batches leave without waiting. Every ``ack_sample_s`` one of them asks the stream for an
acknowledgement, and all that is not confirmed stays in a ring::

    ring   [first ............ next ............ end)     numbers of batches
            written, not        not written yet
            confirmed           (broker away, or sending again)

Batches are always written in the order of their numbers, so an answered question stands for those
before it, but only while all earlier questions are answered as well: when a stream changes its
leader in the middle of a burst, the head of the burst can be lost and its tail confirmed. After a
reconnect, and when an answer does not come, everything from ``first`` on is written again. So a
reader sees some batches twice, and none never.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
import structlog

from infra.bus.connection import Bus, Msg
from schemas.errors import BusUnavailable, QueueFull

_ANSWER_S = 0.5  # a missing answer; doubles up to
_MAX_ANSWER_S = 2.0
_RESEND_ASKS = 50  # while sending again, every so many batches ask

log = structlog.get_logger("bus")


class TokenWriter:
    """One process's writer of token batches.

    Args:
        max_batches: the ring's size: how much an outage of the broker may leave unconfirmed before
            generation has to wait.
        max_bytes: the same in payload bytes.
    """

    def __init__(self, bus: Bus, *, max_batches: int = 16384, max_bytes: int = 64 << 20) -> None:
        self._bus = bus
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._sample_s = bus.times.ack_sample_s
        self._loop = asyncio.get_running_loop()
        self._ring: deque[tuple[str, bytes]] = deque()
        self._ring_bytes = 0
        self._first = 0
        self._next = 0
        self._inbox = bus.new_inbox()
        self._generation = 0  # raised whenever everything is written again
        self._connection = bus.num_reconnects  # on which it was written
        self._asked: dict[int, float | None] = {}  # in order; when, or None: answered
        self._asked_at_s = 0.0
        self._answer_s = _ANSWER_S
        self._progress_s = 0.0  # when something was last confirmed
        self._was_late = False
        self._waiting: dict[asyncio.Future[None], int] = {}  # until the end of what is confirmed
        self._awake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def num_unconfirmed(self) -> int:
        """Batches that the stream has not confirmed."""
        return len(self._ring)

    @property
    def is_full(self) -> bool:
        """No room for another batch: generate nothing until there is."""
        return len(self._ring) >= self._max_batches or self._ring_bytes >= self._max_bytes

    async def until_room(self) -> None:
        """Wait while :attr:`is_full`."""
        while self.is_full:
            self._room.clear()
            await self._room.wait()

    async def put(self, subject: str, data: bytes, *, ask: bool = False) -> None:
        """Take a batch; it will be in the stream, whatever the broker does meanwhile.

        Args:
            ask: for the last batch before a :meth:`flush`: saves writing it twice.

        Raises:
            QueueFull: :attr:`is_full`; the batch was not taken.
            PayloadTooLarge: it would never fit in a message; it was not taken.

        Cost: 35 to 50 µs of CPU, a reader in the same process included.
        """
        if self.is_full:
            raise QueueFull(f"{len(self._ring)} token batches wait for the bus")
        self._bus.check_fits(data)
        if not self._ring:
            self._awake.set()
        self._ring.append((subject, data))
        self._ring_bytes += len(data)
        number = self._first + len(self._ring) - 1
        if self._next == number:
            now_s = self._loop.time()
            await self._write(number, ask=ask or now_s - self._asked_at_s >= self._sample_s)

    async def flush(self, timeout_s: float) -> None:
        """Wait until the stream has confirmed everything put so far: one round trip as a rule.

        Raises:
            BusUnavailable: not within ``timeout_s``. Nothing is given up: it is still sent.
        """
        if not self._ring:
            return
        target = self._first + len(self._ring)
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[future] = target
        timer = self._loop.call_later(timeout_s, self._give_up, future, timeout_s)
        try:
            if self._next == target and (target - 1) not in self._asked:
                await self._write(target - 1, ask=True)
            await future
        finally:
            timer.cancel()
            del self._waiting[future]

    def _give_up(self, future: asyncio.Future[None], after_s: float) -> None:
        if not future.done():
            text = f"{len(self._ring)} token batches not confirmed in {after_s:.3g} s"
            future.set_exception(BusUnavailable(text))

    async def run(self) -> None:
        """Confirm and send again, for ever; the owner cancels it after a :meth:`flush`."""
        subscription = await self._bus.subscribe(f"{self._inbox}.*.*", self._hear)
        self._bus.on_reconnected.append(self._start_over)
        try:
            while True:
                await self._awake.wait()
                self._awake.clear()
                while self._ring:
                    await self._look()
                    await self._until_look()
        finally:
            self._bus.on_reconnected.remove(self._start_over)
            await subscription.unsubscribe()

    # -- writing -------------------------------------------------------------------------------

    async def _write(self, number: int, *, ask: bool) -> bool:
        """Write one batch of the ring; False when the broker does not take it now.

        On a new connection everything is written from the ring's beginning: an answer to what is
        written there says nothing of what went down with the old one.
        """
        if self._connection != self._bus.num_reconnects:
            self._start_over()
            return False
        subject, data = self._ring[number - self._first]
        generation = self._generation
        reply = f"{self._inbox}.{generation}.{number}" if ask else ""
        try:
            await self._bus.publish(subject, data, reply=reply)
        except BusUnavailable:
            return False
        if generation != self._generation:
            return False  # the connection broke while we wrote: everything is written again
        self._next = max(self._next, number + 1)
        if ask:
            self._asked_at_s = self._loop.time()
            self._asked[number] = self._asked_at_s
        return True

    def _start_over(self) -> None:
        """Write everything unconfirmed again."""
        self._connection = self._bus.num_reconnects
        self._generation += 1
        self._asked.clear()
        self._next = self._first
        self._awake.set()

    async def _look(self) -> None:
        now_s = self._loop.time()
        if self._is_answer_missing(now_s):
            log.warning("token_ack_missing", num_unconfirmed=len(self._ring))
            self._answer_s = min(2 * self._answer_s, _MAX_ANSWER_S)
            self._start_over()
        await self._catch_up()
        end = self._first + len(self._ring)
        is_quiet = now_s - self._asked_at_s >= self._sample_s
        if self._ring and self._next == end and (end - 1) not in self._asked and is_quiet:
            await self._write(end - 1, ask=True)

    def _is_answer_missing(self, now_s: float) -> bool:
        """No progress for too long, seen twice: the first time our own loop may have been busy."""
        oldest_s = next((when for when in self._asked.values() if when is not None), now_s)
        was_late = self._was_late
        self._was_late = now_s - max(oldest_s, self._progress_s) > self._answer_s
        return was_late and self._was_late

    async def _catch_up(self) -> None:
        """Write what is behind ``next``; batches put meanwhile queue up behind it."""
        while self._next < (end := self._first + len(self._ring)):
            number = self._next
            if not await self._write(number, ask=number % _RESEND_ASKS == 0 or number == end - 1):
                return
            if number % _RESEND_ASKS == 0:
                await asyncio.sleep(0)

    async def _until_look(self) -> None:
        try:
            async with asyncio.timeout(self._sample_s):
                await self._awake.wait()
                self._awake.clear()
        except TimeoutError:
            return

    # -- hearing -------------------------------------------------------------------------------

    def _hear(self, message: Msg) -> None:
        generation, number = map(int, message.subject.rsplit(".", 2)[1:])
        if generation != self._generation or number not in self._asked or not message.data:
            return  # of before, or no stream there: asked again when the time is over
        answer = msgspec.json.decode(message.data)
        if "error" in answer:
            log.warning("token_batch_refused", reason=answer["error"].get("description"))
            return
        self._asked[number] = None
        confirmed = self._first
        for asked in list(self._asked):
            if self._asked[asked] is not None:
                break
            del self._asked[asked]
            confirmed = max(confirmed, asked + 1)
        self._confirm(confirmed)

    def _confirm(self, end: int) -> None:
        if end > self._first:
            self._progress_s = self._loop.time()
        while self._first < end:
            self._ring_bytes -= len(self._ring.popleft()[1])
            self._first += 1
        if not self._ring:
            self._answer_s = _ANSWER_S
        if not self.is_full:
            self._room.set()
        for future, target in self._waiting.items():
            if target <= end and not future.done():
                future.set_result(None)
