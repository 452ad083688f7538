"""Bringing other workers' blocks into our own pool.

    fetch       reserves blocks of our pool and copies into them, what is large on a thread
    is_there    waits for the copy, which checks what it has read
    release     when the blocks are not used after all

A copy that has begun can't be stopped. Blocks that are being filled are given back when that has
ended, never before: the copy would go on into what is another request's by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from infra.metrics import Metrics
from infra.transport.reader import KvReader, Transport
from infra.transport.shm import SharedPool
from schemas.errors import ContextTooLong, EngineFailed, KvLost, MeshError, NoCapacity
from schemas.kv import KvHandle
from workers.engine.api import EngineApi, EngineInfo
from workers.engine.thread import EngineThread

AT_ONCE_BYTES = 2 << 20  # copied and checked in 0.3 ms: to go to a thread and back takes as long
RESERVE_S = 10.0  # a step may take seconds; after so long another worker may be better
READ_S = 30.0  # of one transfer; after so long it is sooner computed again
_NUM_THREADS: Mapping[Transport, int] = {
    "shm": 1,  # two would share one memory bus
    "ucx": 8,  # they wait, and take turns on the network
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Blocks of our pool that are being filled with the KV of ``num_tokens`` tokens."""

    blocks: tuple[int, ...]
    num_tokens: int
    _copy: asyncio.Future[bool]

    async def is_there(self, within_s: float | None = None) -> bool:
        """Wait until they are filled, at most ``within_s``; whether they are.

        Raises:
            KvLost: they can't be, or hold what they should not; see :meth:`KvReader.read`.
            ContextTooLong: our pool is too small for them.
        """
        await asyncio.wait([self._copy], timeout=within_s)  # never cancels the copy
        return self._copy.done() and self._copy.result()


class KvIntake:
    """The way into one process's pool.

    Args:
        memory: that pool, whose blocks ``engine`` gives out.
        reader: reads other workers' pools; closed with this.
    """

    def __init__(
        self,
        engine: EngineThread,
        memory: SharedPool,
        info: EngineInfo,
        reader: KvReader,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._info = info
        self._metrics = metrics
        self._reader = reader
        self._threads = {
            transport: ThreadPoolExecutor(count, f"kv-{transport}")
            for transport, count in _NUM_THREADS.items()
        }
        self._copies: dict[str, Future[bool]] = {}  # by key, while under way

    async def fetch(self, key: str, handle: KvHandle, timeout_s: float = READ_S) -> Arrival:
        """Reserve blocks under ``key`` and fill them from those of ``handle``, or begin to. What
        makes that impossible is told by the arrival.

        Args:
            timeout_s: for the transfer; what is not there by then is lost.

        Raises:
            NoCapacity: no room now; nothing is reserved.
        """
        deadline_s = time.monotonic() + timeout_s
        blocks: tuple[int, ...] = ()
        try:
            self._check(handle)
            blocks = await self._reserve(key, handle.num_tokens)
            transport, _ = self._reader.way(handle)
            is_small = len(blocks) * self._memory.block_bytes <= AT_ONCE_BYTES
            if is_small and self._read_at_once(handle, blocks):
                return Arrival(blocks=blocks, num_tokens=handle.num_tokens, _copy=_ended(None))
        except (KvLost, ContextTooLong) as error:
            return Arrival(blocks=blocks, num_tokens=handle.num_tokens, _copy=_ended(error))
        copy = self._threads[transport].submit(self._read, handle, blocks, deadline_s)
        self._copies[key] = copy
        copy.add_done_callback(lambda _: self._copies.pop(key, None))
        return Arrival(blocks=blocks, num_tokens=handle.num_tokens, _copy=_heard(copy))

    def release(self, key: str) -> None:
        """Give back what ``key`` holds, as soon as nothing is copied into it."""
        copy = self._copies.get(key)
        if copy is None:
            self._engine.release(key)
        else:
            copy.cancel()
            copy.add_done_callback(lambda _: self._engine.release(key))

    def prune(self) -> None:
        """Let go of workers that are gone. Does not wait."""
        self._reader.prune()

    def close(self) -> None:
        """Wait for copies that run, drop those that wait, unmap everything."""
        for threads in self._threads.values():
            threads.shutdown(cancel_futures=True)
        self._reader.close()

    def _check(self, handle: KvHandle) -> None:
        if handle.fingerprint != self._info.fingerprint:
            raise KvLost(f"blocks of {handle.owner} have another layout or model")
        if not 0 < handle.num_tokens <= self._info.context_length:
            raise KvLost(f"handle {handle.lease_id} is of {handle.num_tokens} tokens")

    async def _reserve(self, key: str, num_tokens: int) -> tuple[int, ...]:
        try:
            async with asyncio.timeout(RESERVE_S):
                reserved = await self._engine.call(_reserve(key, num_tokens))
        except TimeoutError:
            self._engine.release(key)
            raise NoCapacity(f"the engine did not answer in {RESERVE_S:.0f} s") from None
        except asyncio.CancelledError:
            self._engine.release(key)  # the answer may have been on its way
            raise
        except EngineFailed as error:
            raise NoCapacity(f"this worker is at its end: {error.message}") from error
        if reserved is None:
            raise NoCapacity("no room in the KV pool now")
        if isinstance(reserved, NoCapacity):
            small = f"too long for this worker's memory: {reserved.message}"
            raise ContextTooLong(small, param="max_tokens") from reserved
        return reserved

    def _read_at_once(self, handle: KvHandle, blocks: tuple[int, ...]) -> bool:
        started_s = time.perf_counter()
        if not self._reader.read_at_once(handle, self._memory, blocks):
            return False
        self._count("shm", started_s, len(blocks))
        return True

    def _read(self, handle: KvHandle, blocks: tuple[int, ...], deadline_s: float) -> bool:
        started_s = time.perf_counter()
        transport = self._reader.read(handle, self._memory, blocks, deadline_s)
        self._count(transport, started_s, len(blocks))
        return True

    def _count(self, transport: Transport, started_s: float, num_blocks: int) -> None:
        took_s = time.perf_counter() - started_s
        self._metrics.kv_transfer_seconds.labels(transport).observe(took_s)
        num_bytes = num_blocks * self._memory.block_bytes
        self._metrics.kv_transfer_bytes.labels(transport).inc(num_bytes)


def _ended(error: MeshError | None) -> asyncio.Future[bool]:
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    if error is None:
        future.set_result(True)
    else:
        future.set_exception(error)
        future.exception()  # nobody may ask
    return future


def _heard(copy: Future[bool]) -> asyncio.Future[bool]:
    future = asyncio.wrap_future(copy)
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return future


def _reserve(
    key: str, num_tokens: int
) -> Callable[[EngineApi], tuple[int, ...] | NoCapacity | None]:
    """None: no room now. NoCapacity: no room ever."""

    def reserve(engine: EngineApi) -> tuple[int, ...] | NoCapacity | None:
        try:
            return engine.reserve(key, num_tokens)
        except NoCapacity as error:
            return error

    return reserve
