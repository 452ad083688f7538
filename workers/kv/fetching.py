"""Reading another worker's blocks into our host tier.

    ask       the owner: a handle on the first blocks that it has
    reserve   slots of our host tier
    read      on a thread, checked
    commit    or abort, once; then the lease is given back

A read that has begun can't be stopped: slots that are being filled are given back when it has
ended, never before. It would go on into what is another block's by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from infra.transport.shm import SharedPool
from schemas.codec import pack_ids, unpack_ids
from schemas.errors import KvLost, SchemaError
from schemas.kv import KvHandle
from workers.kv.api import BlockName, Filling, HostTier
from workers.kv.borrowing import Lenders
from workers.kv.handles import pack_checksums, unpack_checksums

Outcome = Literal["fetched", "refused", "late", "lost", "no_room", "cancelled", "failed"]

RENEW_S = 2.0  # a reader that is still at it says so; a lease stands several times as long
_NUM_THREADS = 2


class BlockReader(Protocol):
    """What moves blocks between workers; see :class:`infra.transport.reader.KvReader`."""

    def read(
        self, handle: KvHandle, into: SharedPool, slots: Sequence[int], deadline_s: float
    ) -> object:
        """Copy the blocks of ``handle`` into ``slots`` and check them, by ``deadline_s``
        (monotonic) where that can be kept. Blocks the calling thread; afterwards nothing is
        written there.

        Raises:
            KvLost: not read, not in time, or not what was promised.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Blocks that are in the host tier now, and what that took."""

    num_blocks: int
    ask_s: float  # until it was clear what could be read
    read_s: float


class NotFetched(Exception):
    """Blocks did not come, and nothing of them is held: they are computed."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome


class Fetching:
    """The way from other workers into one process's host tier."""

    def __init__(self, tier: HostTier, reader: BlockReader, fingerprint: str) -> None:
        self._tier = tier
        self._reader = reader
        self._fingerprint = fingerprint
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "kv-fetch")

    def close(self) -> None:
        """Wait for the reads that run, drop those that wait."""
        self._threads.shutdown(cancel_futures=True)

    async def fetch(
        self, owner: str, blocks: Sequence[BlockName], ends_s: float, lenders: Lenders
    ) -> Moved:
        """Bring the first of ``blocks`` that ``owner`` lends, by ``ends_s`` (monotonic).

        Raises:
            NotFetched: none of them; the owner's lease is given back.
        """
        asked_s = time.monotonic()
        num_lent, handle = await self._ask(owner, blocks, ends_s - asked_s, lenders)
        is_read, began_s = False, time.monotonic()
        try:
            num_blocks = await self._read(handle, blocks[:num_lent], ends_s, lenders)
            is_read = True
        finally:
            await lenders.release(handle, ok=is_read)
        read_s = time.monotonic() - began_s
        return Moved(num_blocks=num_blocks, ask_s=began_s - asked_s, read_s=read_s)

    async def _ask(
        self, owner: str, blocks: Sequence[BlockName], left_s: float, lenders: Lenders
    ) -> tuple[int, KvHandle]:
        if left_s <= 0:
            raise NotFetched("late", "no time was left to ask")
        try:
            lent = await lenders.ask(owner, blocks, left_s)
        except KvLost as error:
            raise NotFetched("late", error.message) from error
        if lent.handle is None:
            raise NotFetched("refused", f"{owner} lends nothing: {lent.reason}")
        return lent.num_blocks, lent.handle

    async def _read(
        self, handle: KvHandle, blocks: Sequence[BlockName], ends_s: float, lenders: Lenders
    ) -> int:
        if handle.fingerprint != self._fingerprint:
            raise NotFetched("lost", f"blocks of {handle.owner} have another layout or model")
        filling = self._tier.reserve(blocks)
        if not filling.slots:
            raise NotFetched("no_room", "the host tier has no room for them now")
        try:
            part = _part(handle, blocks, filling)
        except (KvLost, SchemaError) as error:
            self._tier.abort(filling)
            raise NotFetched("lost", error.message) from error
        memory = self._tier.memory
        reading = self._threads.submit(self._reader.read, part, memory, filling.slots, ends_s)
        try:
            await _until(reading, ends_s, handle, lenders)
        except BaseException as error:
            reading.cancel()
            reading.add_done_callback(lambda _: self._tier.abort(filling))
            if isinstance(error, KvLost):
                raise NotFetched("lost", error.message) from error
            if isinstance(error, TimeoutError):
                raise NotFetched("late", "not read in time") from error
            raise
        self._tier.commit(filling, unpack_checksums(part.checksums))
        return len(filling.slots)


async def _until(
    reading: Future[object], ends_s: float, handle: KvHandle, lenders: Lenders
) -> None:
    """Wait for a read, and tell the owner now and then that it goes on.

    Raises:
        TimeoutError: it has not ended by ``ends_s``.
        KvLost: it failed.
    """
    waiting = asyncio.wrap_future(reading)
    waiting.add_done_callback(_look_at)
    while True:
        left_s = ends_s - time.monotonic()
        await asyncio.wait({waiting}, timeout=max(0.0, min(left_s, RENEW_S)))
        if waiting.done():
            waiting.result()
            return
        if left_s <= 0:
            raise TimeoutError
        await lenders.renew(handle)


def _look_at(future: asyncio.Future[object]) -> None:
    """It may end after whoever waited has gone: that is no news to anybody."""
    if not future.cancelled():
        future.exception()


def _part(handle: KvHandle, blocks: Sequence[BlockName], filling: Filling) -> KvHandle:
    """``handle``, which is of ``blocks``, for those alone that are to be filled.

    Raises:
        KvLost, SchemaError: it is not of so many blocks.
    """
    slots, generations = unpack_ids(handle.blocks), unpack_ids(handle.generations)
    num_checksums, odd = divmod(len(handle.checksums), 8)
    if odd or not len(slots) == len(generations) == num_checksums == len(blocks):
        raise KvLost(f"handle {handle.lease_id} is not of {len(blocks)} blocks")
    place = {block.block_hash: number for number, block in enumerate(blocks)}
    rows = [place[block.block_hash] for block in filling.blocks]
    checksums = unpack_checksums(handle.checksums)
    return msgspec.structs.replace(
        handle,
        num_tokens=handle.num_tokens // len(blocks) * len(rows),
        blocks=pack_ids([slots[row] for row in rows]),
        generations=pack_ids([generations[row] for row in rows]),
        checksums=pack_checksums([checksums[row] for row in rows]),
    )
