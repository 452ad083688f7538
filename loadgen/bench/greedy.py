"""The greedy clients of ``mesh bench slow``: they ask for much, and read all of it or nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

from infra.bus import Bus, Msg
from infra.task_scope import task_scope
from loadgen.bench.own_mesh import OwnMesh
from loadgen.bench.slow_client import CUT, SocketClient, bus_client, http_client
from pipeline.claim_chain import ClaimChain
from schemas import subjects
from schemas.errors import SchemaError
from schemas.tokens import Cancelled, decode_chain_entry

_WORD_S = 30.0  # for the reason of a cut to come behind what was not read
Opened = Callable[[], AbstractAsyncContextManager[SocketClient]]


@dataclass(slots=True, kw_only=True)
class Block:
    """A time in which the greedy clients all read, or none does."""

    is_slow: bool
    start_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Cuts:
    """What became of HTTP clients that did not read."""

    num_slow: int = 0
    after_s: list[float] = field(default_factory=list)  # from the answer's head to the cut
    num_told: int = 0  # who found the reason at the end of what came


class Greedy:
    """Always so many at a time, in each block.

    Args:
        num: of each kind: over HTTP, on the bus.
        cuts: counts those who were cut.
    """

    def __init__(self, own: OwnMesh, model: str, num: int, bus: Bus, cuts: Cuts) -> None:
        self._opens: list[Opened] = [
            lambda: http_client(own.url, model),
            lambda: bus_client(own.nats_url, model),
        ] * num
        self._bus = bus
        self._cuts = cuts
        self._cut: dict[str, asyncio.Event] = {}  # HTTP clients that do not read, by request

    async def listen(self) -> None:
        """Hear which requests are ended for their readers' slowness."""
        await self._bus.subscribe(subjects.live(subjects.ALL_CHAINS), self._hear)

    def _hear(self, message: Msg) -> None:
        with suppress(SchemaError):
            entry = decode_chain_entry(message.data)
            if isinstance(entry, Cancelled) and entry.request_id in self._cut:
                self._cut[entry.request_id].set()

    async def play(self, length_s: float, *, is_slow: bool) -> Block:
        """One block."""
        start_s = time.monotonic()
        async with task_scope() as tasks:
            for one in self._opens:
                tasks.create_task(self._keep(one, is_slow=is_slow))
            await asyncio.sleep(length_s)
        return Block(is_slow=is_slow, start_s=start_s, end_s=time.monotonic())

    async def play_until_cut(self, limit_s: float) -> None:
        """All those over HTTP read nothing until they are cut, or ``limit_s`` has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
                for opened in self._opens[::2]:
                    tasks.create_task(self._until_one_is_cut(opened))

    async def _until_one_is_cut(self, opened: Opened) -> None:
        async with opened() as client:
            await self._until_cut(client)

    async def _keep(self, opened: Opened, *, is_slow: bool) -> None:
        while True:
            async with opened() as client:
                try:
                    if not is_slow:
                        await client.read_all()
                    elif client.reader:  # the broker deals with it; its request runs to its end
                        await asyncio.Event().wait()
                    else:
                        await self._until_cut(client)
                finally:
                    if client.reader:
                        await self._end(client)

    async def _until_cut(self, client: SocketClient) -> None:
        self._cuts.num_slow += 1
        cut = self._cut[client.request_id] = asyncio.Event()
        since_s = time.monotonic()
        try:
            await cut.wait()
        finally:
            del self._cut[client.request_id]
        self._cuts.after_s.append(time.monotonic() - since_s)
        is_told = CUT in await client.rest(_WORD_S)
        self._cuts.num_told += is_told  # not across the await: others count as well

    async def _end(self, client: SocketClient) -> None:
        """A bus request does not end with its subscriber: say so, as its client would."""
        entry = Cancelled(request_id=client.request_id, reason="the block is over")
        await ClaimChain(self._bus).end(client.reader, entry)
