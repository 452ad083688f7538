"""Bringing other workers' blocks into our own pool.

    fetch       reserves blocks of our pool and copies into them, what is large on a thread
    complete    waits for the copy, which checks what it has read
    release     when the blocks are not used after all

A copy that has begun can't be stopped. Blocks that are being filled are given back when that has
ended, never before: the copy would go on into what is another request's by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from infra.metrics import Metrics
from infra.transport.handover import PoolReader
from infra.transport.shm import SharedPool
from schemas.errors import ContextTooLong, EngineFailed, KvLost, MeshError, NoCapacity
from schemas.kv import KvHandle
from workers.engine.api import EngineApi, EngineInfo
from workers.engine.thread import EngineThread

AT_ONCE_BYTES = 2 << 20  # copied and checked in 0.3 ms: to go to a thread and back takes as long
RESERVE_S = 10.0  # a step may take seconds; after so long another worker may be better


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Blocks of our pool that are being filled with the KV of ``num_tokens`` tokens."""

    blocks: tuple[int, ...]
    num_tokens: int
    _copy: Future[bool]

    async def complete(self) -> None:
        """Wait until they are filled.

        Raises:
            KvLost: they can't be, or hold what they should not; see :meth:`PoolReader.read`.
            ContextTooLong: our pool is too small for them.
        """
        if self._copy.done():  # as a rule: the claim took longer
            self._copy.result()
        else:
            await asyncio.wrap_future(self._copy)


class KvIntake:
    """The way into one process's pool.

    Args:
        memory: that pool, whose blocks ``engine`` gives out.
    """

    def __init__(
        self, engine: EngineThread, memory: SharedPool, info: EngineInfo, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._info = info
        self._metrics = metrics
        self._reader = PoolReader()
        self._thread = ThreadPoolExecutor(1, "kv-intake")
        self._copies: dict[str, Future[bool]] = {}  # by key, while under way

    async def fetch(self, key: str, handle: KvHandle) -> Arrival:
        """Reserve blocks under ``key`` and fill them from those of ``handle``, or begin to. What
        makes that impossible is told by ``complete``.

        Raises:
            NoCapacity: no room now; nothing is reserved.
        """
        blocks: tuple[int, ...] = ()
        try:
            self._check(handle)
            blocks = await self._reserve(key, handle.num_tokens)
            is_small = len(blocks) * self._memory.block_bytes <= AT_ONCE_BYTES
            if is_small and self._read(handle, blocks, at_once=True):
                return Arrival(blocks=blocks, num_tokens=handle.num_tokens, _copy=_ended(None))
        except (KvLost, ContextTooLong) as error:
            return Arrival(blocks=blocks, num_tokens=handle.num_tokens, _copy=_ended(error))
        copy = self._thread.submit(self._read, handle, blocks)
        self._copies[key] = copy
        copy.add_done_callback(lambda _: self._copies.pop(key, None))
        return Arrival(blocks=blocks, num_tokens=handle.num_tokens, _copy=copy)

    def release(self, key: str) -> None:
        """Give back what ``key`` holds, as soon as nothing is copied into it."""
        copy = self._copies.get(key)
        if copy is None:
            self._engine.release(key)
        else:
            copy.cancel()
            copy.add_done_callback(lambda _: self._engine.release(key))

    def prune(self) -> None:
        """Let go of the memory of workers that are gone. Does not wait."""
        self._reader.prune()

    def close(self) -> None:
        """Wait for the copy that runs, drop those that wait, unmap everything."""
        self._thread.shutdown(cancel_futures=True)
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

    def _read(self, handle: KvHandle, blocks: tuple[int, ...], *, at_once: bool = False) -> bool:
        started_s = time.perf_counter()
        if not at_once:
            self._reader.read(handle, self._memory, blocks)
        elif not self._reader.read_at_once(handle, self._memory, blocks):
            return False
        self._metrics.kv_transfer_seconds.observe(time.perf_counter() - started_s)
        self._metrics.kv_transfer_bytes.inc(len(blocks) * self._memory.block_bytes)
        return True


def _ended(error: MeshError | None) -> Future[bool]:
    future: Future[bool] = Future()
    if error is None:
        future.set_result(True)
    else:
        future.set_exception(error)
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
