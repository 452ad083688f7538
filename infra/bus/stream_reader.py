"""Following one reader's part of the token stream, in stream order, without gap or repeat.

Live messages come from the stream itself (it republishes what it has stored), so they arrive in
its order, with their sequence and that of the subject's message before them. What is missed, at a
late start, over a broken connection, behind a full queue, is read from the stream::

    following   a live message is delivered as it comes
    filling     live messages wait in ``held`` while a replay delivers what the stream has;
                then those held follow, and we are following again

A hole that shows only in the second message after it (a server of a cluster died between storing
and republishing) is filled late: its messages come with their own, lower sequences. On one server
that can't happen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from infra.bus.connection import Bus, BusSubscription, Msg
from infra.bus.names import TOKENS
from infra.bus.replay import end_of_stream, replay
from infra.bus.wire import number_in
from schemas import subjects
from schemas.errors import BusUnavailable

_MAX_SUBJECTS = 65536  # whose last sequences are remembered
_RETRY_S = 0.05
_MAX_HELD_MSGS = 8192
_MAX_HELD_BYTES = 32 << 20
_SEQUENCE, _PREVIOUS = b"\r\nNats-Sequence: ", b"\r\nNats-Last-Sequence: "

Deliver = Callable[[int, str, bytes], None]


class _Live(NamedTuple):
    seq: int
    previous: int  # of the same subject; 0: none
    subject: str
    data: bytes


class StreamReader:
    """Delivers everything below ``stored_filter`` (``schemas.subjects.reader_filter``).

    Args:
        deliver: called with (stream sequence, stored subject, payload); must return at once.
    """

    def __init__(self, bus: Bus, stored_filter: str, deliver: Deliver) -> None:
        self._bus = bus
        self._filter = stored_filter
        self._deliver = deliver
        self._subscription: BusSubscription | None = None
        self._last_of: dict[str, int] = {}
        self._horizon = 0  # all up to here is seen, or was before our start
        self._last = 0  # the highest sequence seen
        self._is_filling = True
        self._fill_from = 1
        self._held: deque[_Live] = deque()
        self._held_bytes = 0
        self._has_missed = False  # while filling: a live message was lost again
        self._awake = asyncio.Event()
        self.num_fills = 0  # how often the stream had to be read

    @property
    def last_seq(self) -> int:
        """The highest sequence delivered: where a resume goes on is one above."""
        return self._last

    @property
    def is_filling(self) -> bool:
        """The stream is being read for something missed; what comes live waits."""
        return self._is_filling

    async def start(self, from_seq: int | None = None) -> None:
        """Subscribe, deliver what is stored from ``from_seq`` on, then follow.

        None starts with what is stored from now on. :meth:`run` must run as well.

        Raises:
            BusUnavailable: not started.
            BusForbidden: our user may not read this stream.
        """
        for moments in self._moments():
            moments.append(self._miss)
        try:
            self._subscription = await self._bus.subscribe(
                subjects.live(self._filter), self._receive
            )
            if from_seq is None:
                from_seq = await end_of_stream(self._bus, TOKENS, self._filter) + 1
            self._horizon = self._last = max(from_seq, 1) - 1
            self._fill_from = self._horizon + 1
            await self._fill()
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Fill gaps whenever there are some, for ever; outages are waited out. One that is
        cancelled amid that is gone on with by the next."""
        while True:
            if not self._is_filling:
                await self._awake.wait()
            self._awake.clear()
            while self._is_filling:
                try:
                    await self._fill()
                except BusUnavailable:
                    await self._bus.until_connected(1.0)
                    await asyncio.sleep(_RETRY_S)

    def check(self) -> None:
        """Look into the stream for anything missed: for who waits and hears nothing. 1 ms."""
        self._miss()

    async def close(self) -> None:
        """Deliver nothing more."""
        for moments in self._moments():
            with contextlib.suppress(ValueError):
                moments.remove(self._miss)
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def __aenter__(self) -> StreamReader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _moments(self) -> tuple[list[Callable[[], None]], ...]:
        """When messages are lost. Already as the connection breaks: a live message may come over
        the next one before that is told of, and what was lost has lower sequences."""
        return self._bus.on_disconnected, self._bus.on_reconnected

    # -- live ----------------------------------------------------------------------------------

    def _receive(self, message: Msg) -> None:
        if self._subscription is None and not self._is_filling:
            return
        seq = number_in(message.header, _SEQUENCE)
        if seq is None:
            return  # not the stream's own: somebody published to the live subject
        live = _Live(
            seq,
            number_in(message.header, _PREVIOUS) or 0,
            subjects.stored(message.subject),
            message.data,
        )
        if self._is_filling:
            self._hold(live)
        else:
            self._take(live)

    def _hold(self, live: _Live) -> None:
        if len(self._held) >= _MAX_HELD_MSGS or self._held_bytes > _MAX_HELD_BYTES:
            self._has_missed = True
            return
        self._held.append(live)
        self._held_bytes += len(live.data)

    def _take(self, live: _Live) -> None:
        seen = self._seen(live.subject)
        if live.seq <= seen:
            return
        if live.previous > seen:
            self._begin_fill(seen + 1)
            self._hold(live)
            return
        self._accept(live.seq, live.subject, live.data)

    def _seen(self, subject: str) -> int:
        return max(self._last_of.get(subject, 0), self._horizon)

    def _accept(self, seq: int, subject: str, data: bytes) -> None:
        self._last_of[subject] = seq
        self._last = max(self._last, seq)
        if len(self._last_of) > _MAX_SUBJECTS:
            self._forget()
        self._deliver(seq, subject, data)

    def _forget(self) -> None:
        """All up to the last one was seen: one number stands for all subjects."""
        self._horizon = self._last
        self._last_of.clear()

    # -- filling -------------------------------------------------------------------------------

    def _miss(self) -> None:
        """Live messages may have been lost, anywhere behind the last one seen."""
        if self._is_filling:
            self._has_missed = True
        else:
            self._begin_fill(self._last + 1)

    def _begin_fill(self, from_seq: int) -> None:
        self._is_filling = True
        self._fill_from = from_seq
        self._awake.set()

    async def _fill(self) -> None:
        """Deliver what the stream has from ``_fill_from`` on, then what was held meanwhile."""
        self.num_fills += 1
        while True:
            self._has_missed = False
            stored = replay(self._bus, TOKENS, self._filter, start_seq=self._fill_from)
            async with contextlib.aclosing(stored) as messages:
                async for message in messages:
                    if message.seq > self._seen(message.subject):
                        self._accept(message.seq, message.subject, message.data)
                    self._fill_from = message.seq + 1
            if not self._has_missed:
                break
            self._drop_held()
        held, self._held, self._held_bytes = self._held, deque(), 0
        self._is_filling = False
        while held and not self._is_filling:
            self._take(held.popleft())
        for live in held:
            self._hold(live)

    def _drop_held(self) -> None:
        """The replay that follows delivers all of them."""
        self._held.clear()
        self._held_bytes = 0
