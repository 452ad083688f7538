"""Everything that comes for one reader, shared by all who read requests from it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from infra.bus import TOKENS, Bus, StreamReader, replay
from infra.task_scope import task_scope
from pipeline.claim_chain import ClaimChain
from pipeline.stream_hub import StreamHub
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.errors import BusUnavailable

_REPLAYS = 3


class ReaderFeed:
    """One subscription to a reader's part of the stream, however many requests are read from it.

    A thousand clients of a dead bridge that come to another one all read its one reader: each
    message is received and decoded once, and who comes while a replay runs shares the next one.

    Args:
        tell_worker, max_waiting, on_overflow: as for :class:`StreamHub`.
    """

    def __init__(
        self,
        bus: Bus,
        reader: str,
        *,
        max_waiting: int,
        tell_worker: Callable[[str, str], Awaitable[None]] | None = None,
        on_overflow: Callable[[TokenStream], None] | None = None,
    ) -> None:
        self.reader = subjects.check_reader(reader)
        self.num_users = 0  # counted by whoever hands the feed out
        self._bus = bus
        self._filter = subjects.reader_filter(reader)
        self.hub = StreamHub(
            ClaimChain(bus),
            bus.now_unix_ms,
            tell_worker,
            self._check,
            max_waiting=max_waiting,
            on_overflow=on_overflow,
        )
        self._messages = StreamReader(bus, self._filter, self.hub.on_message)
        self._behind: dict[TokenStream, int] = {}  # who waits for a replay, from which sequence
        self._starting = asyncio.Lock()
        self._running = asyncio.Lock()
        self._replaying = asyncio.Lock()
        self._is_started = False

    @property
    def last_seq(self) -> int:
        """The highest stream sequence that was seen."""
        return self._messages.last_seq

    async def follow(self, stack: AsyncExitStack) -> None:
        """Listen until ``stack`` is closed. Of several followers one does the work for all; the
        last one ends the subscription, for good.

        Closed by its ``aclose``, which tells the helper's scope of no exception, the stack leaves
        callers theirs.

        Raises:
            BusUnavailable: not started.
            BusForbidden: our user may not read this reader's stream.
        """
        stack.push_async_callback(self._close_if_unused)
        async with self._starting:
            if not self._is_started:
                await self._messages.start()
                self._is_started = True
        tasks = await stack.enter_async_context(task_scope())
        tasks.create_task(self._run(), name="reader")

    async def _run(self) -> None:
        async with self._running:  # whoever is next goes on when this one leaves
            await self._messages.run()

    async def _close_if_unused(self) -> None:
        if not self.num_users:
            await self._messages.close()

    async def catch_up(self, stream: TokenStream, start_seq: int) -> None:
        """Give ``stream`` what is stored from ``start_seq`` on, before what comes live meanwhile.

        Raises:
            BusUnavailable: the replay failed; ``stream`` is of no use then.
        """
        stream.hold()
        self._behind[stream] = start_seq
        try:
            async with self._replaying:
                if stream in self._behind:  # else the replay before ours served it as well
                    await self._replay()
        finally:
            self._behind.pop(stream, None)

    async def _replay(self) -> None:
        """One that breaks off is tried again while the bus is there: a busy broker drops some."""
        for left in reversed(range(_REPLAYS)):
            try:
                await self._replay_once()
                return
            except BusUnavailable:
                if not left or not self._bus.is_connected:
                    raise

    async def _replay_once(self) -> None:
        served = list(self._behind)
        start_seq = min(self._behind.values())
        past = replay(self._bus, TOKENS, self._filter, start_seq=start_seq)
        await self.hub.catch_up(served, past)
        for stream in served:
            self._behind.pop(stream, None)

    def _check(self) -> None:
        self._messages.check()
