"""Reading blocks over UCX: connections to owners, and one transfer after or beside the other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial

from infra.failure import first_mesh_error
from infra.task_scope import task_scope
from infra.transport.shm import SharedPool
from infra.transport.ucx.connection import Asked, Chunk, Connection, connect
from infra.transport.ucx.link import UcxContext
from infra.transport.ucx.wire import CHUNK_BYTES, MAX_BLOCKS, data_at, read_header
from infra.transport.wanted import Wanted
from schemas.errors import KvLost
from schemas.kv import KvHandle

SCHEME = "ucx://"
_MAX_CONNECTIONS = 32  # owners; one that nobody reads is closed for a new one


class UcxReader:
    """Reads blocks out of other workers' pools. Of one event loop."""

    def __init__(self, context: UcxContext) -> None:
        self._context = context
        self._connections: OrderedDict[str, Connection] = OrderedDict()  # last used last
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keep connections until cancelled; then close them."""
        try:
            async with task_scope() as self._tasks:
                await asyncio.Event().wait()
        finally:
            for connection in self._connections.values():
                connection.close("this worker ends")
            self._connections.clear()

    async def read(
        self,
        address: str,
        handle: KvHandle,
        into: SharedPool,
        slots: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Copy the blocks of ``handle`` into ``slots`` and check them; nothing is written there
        after the end, whatever it is.

        Raises:
            KvLost: the owner is gone or silent, or gives nothing; a slot was recycled, a checksum
                is wrong; it took longer than ``timeout_s``.
        """
        wanted = Wanted.of(handle, into, slots)
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connection(address, handle)
                _check_fits(connection, wanted, into)
                await _Transfer(connection, handle, wanted, into).run()
        except TimeoutError as error:
            raise KvLost(f"lease {handle.lease_id}: not read within {timeout_s:.1f} s") from error
        except BaseExceptionGroup as group:
            ours = first_mesh_error(group)
            if ours is None:
                raise
            raise KvLost(ours.message) from group

    def prune(self) -> None:
        """Close what is of no use any more."""
        for address, connection in list(self._connections.items()):
            if not connection.is_usable:
                self._drop(address, "the owner is silent")

    async def _connection(self, address: str, handle: KvHandle) -> Connection:
        """The one there is, if it can be used, or a new one."""
        found = self._connections.get(address)
        if found is None or not found.is_usable:
            host, _, port = address.removeprefix(SCHEME).rpartition(":")
            if not port.isdigit():
                raise KvLost(f"{address} is no address")
            made = await connect(host.strip("[]"), int(port), handle, self._context)
            found = self._keep(address, made)
        self._connections.move_to_end(address)
        return found

    def _keep(self, address: str, made: Connection) -> Connection:
        other = self._connections.get(address)
        if other is not None and other.is_usable:
            made.close("there is one already")
            return other
        self._drop(address, "the owner was silent")
        if len(self._connections) >= _MAX_CONNECTIONS:
            self._drop(self._least_needed(), "others are read")
        assert self._tasks is not None, "run comes first"
        self._tasks.create_task(self._watch(address, made), name=f"kv owner {address}")
        self._connections[address] = made
        return made

    async def _watch(self, address: str, connection: Connection) -> None:
        await connection.watch()
        if self._connections.get(address) is connection:
            del self._connections[address]

    def _least_needed(self) -> str:
        idle = (address for address, one in self._connections.items() if one.is_idle)
        return next(idle, next(iter(self._connections)))

    def _drop(self, address: str, reason: str) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close(reason)


class _Transfer:
    """One handle's blocks on their way into our pool."""

    def __init__(
        self, connection: Connection, handle: KvHandle, wanted: Wanted, into: SharedPool
    ) -> None:
        self._connection = connection
        self._handle = handle
        self._wanted = wanted
        self._into = into
        self._num_missing = dict.fromkeys(range(len(wanted.blocks)), into.block_bytes)

    async def run(self) -> None:
        """Ask chunk after chunk, in turn with others, and take in what comes."""
        async with asyncio.TaskGroup() as tasks:
            for chunk in chunks_of(self._wanted.blocks, self._into.block_bytes):
                asked = await self._connection.ask(self._handle, chunk)
                landing = tasks.create_task(self._take_in(chunk, asked))
                # Not in the task: one that is cancelled before it begins runs no line.
                landing.add_done_callback(partial(self._done_with, asked))
        assert not self._num_missing, "the chunks are all of it"

    async def _take_in(self, chunk: Chunk, asked: Asked) -> None:
        await self._connection.arrival(asked)
        self._land(chunk, asked)

    def _done_with(self, asked: Asked, _: object) -> None:
        self._connection.done_with(asked)

    def _land(self, chunk: Chunk, asked: Asked) -> None:
        num_blocks, size = len(chunk.blocks), self._into.block_bytes
        generations = read_header(asked.message, num_blocks)
        if generations is None:
            raise KvLost(f"{self._handle.owner} gives nothing for lease {self._handle.lease_id}")
        self._wanted.check_generations(chunk.first, generations)
        data = asked.message[data_at(num_blocks) :]
        slots = self._wanted.slots[chunk.first : chunk.first + num_blocks]
        if num_blocks == 1:
            self._into.slots[slots[0], chunk.start : chunk.start + chunk.size] = data
            self._count(chunk.first, chunk.size)
            return
        for index, (slot, block) in enumerate(
            zip(slots, data.reshape(num_blocks, size), strict=True)
        ):
            self._into.slots[slot] = block
            self._count(chunk.first + index, size)

    def _count(self, index: int, length: int) -> None:
        """The block is checked as soon as it is whole: its bytes are in the cache."""
        self._num_missing[index] -= length
        if not self._num_missing[index]:
            del self._num_missing[index]
            self._wanted.check_bytes(index, self._into)


def chunks_of(blocks: Sequence[int], block_bytes: int) -> Iterator[Chunk]:
    """Cut a transfer: several small blocks are one chunk, a large block is several."""
    per_chunk = min(MAX_BLOCKS, CHUNK_BYTES // block_bytes)
    if per_chunk:
        for first in range(0, len(blocks), per_chunk):
            some = list(blocks[first : first + per_chunk])
            yield Chunk(first=first, blocks=some, start=0, size=len(some) * block_bytes)
        return
    for first, block in enumerate(blocks):
        for start in range(0, block_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, block_bytes - start)
            yield Chunk(first=first, blocks=[block], start=start, size=size)


def _check_fits(connection: Connection, wanted: Wanted, into: SharedPool) -> None:
    if connection.block_bytes != into.block_bytes or max(wanted.blocks) >= connection.num_blocks:
        raise KvLost(f"handle {wanted.lease_id} does not fit the pools")
