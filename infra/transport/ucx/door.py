"""The owner's end: whoever shows a lease that stands is sent its blocks, chunk by chunk.

A chunk is copied out of the pool before it is sent, and its generations are read after that copy.
So a slow or frozen reader never holds up the pool, and a slot that was recycled meanwhile is told
with its bytes. Each connection has buffers of its own: none waits for another's reader.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np

from infra.log import Logger
from infra.transport.shm import SharedPool
from infra.transport.ucx.link import UcxContext, UcxLink
from infra.transport.ucx.wire import (
    CHUNK_BYTES,
    MAX_BLOCKS,
    MESSAGE_BYTES,
    WINDOW,
    Bytes,
    Enter,
    Fetch,
    NotOurs,
    Welcome,
    clear_header,
    data_at,
    frame,
    read_frame,
    write_header,
)
from schemas.codec import unpack_ids
from schemas.errors import KvLost, SchemaError

MayRead = Callable[[str, bytes], bool]

_ENTER_S = 2.0
_SEND_S = 10.0  # for one message: a reader that takes longer is frozen, or asks for no more
_ACCEPT_RETRY_S = 0.1  # out of descriptors: some guest leaves
_MAX_GUESTS = 64  # readers; the one that asked longest ago leaves for a new one
_HEADER_ONLY = data_at(0)


class UcxDoor:
    """Serves one pool.

    Args:
        may_read: whether (lease id, secret) name a lease that stands; called on this loop.
        listener: a bound TCP socket.
    """

    def __init__(
        self,
        pool: SharedPool,
        may_read: MayRead,
        context: UcxContext,
        listener: socket.socket,
        log: Logger,
    ) -> None:
        self._pool = pool
        self._may_read = may_read
        self._context = context
        self._listener = listener
        self._log = log
        self._guests: OrderedDict[int, asyncio.Task[None]] = OrderedDict()  # last to ask last
        self._num_entered = 0

    async def run(self) -> None:
        """Serve until cancelled; guests see their connection end then."""
        self._listener.setblocking(False)
        self._listener.listen(_MAX_GUESTS)
        async with asyncio.TaskGroup() as tasks:
            while True:
                guest = await self._accept()
                self._num_entered += 1
                number = self._num_entered
                task = tasks.create_task(self._serve(guest, number), name=f"kv guest {number}")
                self._guests[number] = task
                task.add_done_callback(partial(self._forget, number))
                if len(self._guests) > _MAX_GUESTS:
                    next(iter(self._guests.values())).cancel()

    def _forget(self, number: int, _: object) -> None:
        self._guests.pop(number, None)

    async def _accept(self) -> socket.socket:
        while True:
            try:
                guest, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:
                self._log.warning("kv_ucx_door_stuck", reason=str(error))
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            return guest

    async def _serve(self, guest: socket.socket, number: int) -> None:
        try:
            stream, writer = await asyncio.open_connection(sock=guest)
        except OSError:
            guest.close()  # it left at once
            return
        try:
            async with asyncio.timeout(_ENTER_S):
                enter = await read_frame(stream, Enter)
            if self._may_read(enter.lease_id, enter.secret):
                with closing(UcxLink(self._context)) as link:
                    link.connect(enter.address)
                    await self._welcome(writer, link)
                    await self._answer_all(stream, link, number)
        except* (OSError, EOFError, NotOurs, KvLost, TimeoutError) as errors:
            reason = str(errors.exceptions[0]) or type(errors.exceptions[0]).__name__
            self._log.info("kv_guest_left", transport="ucx", reason=reason)
        finally:
            writer.close()

    async def _welcome(self, writer: asyncio.StreamWriter, link: UcxLink) -> None:
        welcome = Welcome(
            address=link.address,
            num_blocks=self._pool.num_blocks,
            block_bytes=self._pool.block_bytes,
        )
        async with asyncio.timeout(_ENTER_S):
            writer.write(frame(welcome))
            await writer.drain()

    async def _answer_all(self, stream: asyncio.StreamReader, link: UcxLink, number: int) -> None:
        """Until the guest leaves. The next word is read when there is a buffer for its answer."""
        buffers: asyncio.Queue[Bytes] = asyncio.Queue()
        for _ in range(WINDOW):
            buffers.put_nowait(np.empty(MESSAGE_BYTES, np.uint8))
        async with asyncio.TaskGroup() as tasks:
            while True:
                fetch = await read_frame(stream, Fetch)
                self._guests.move_to_end(number)
                buffer = await buffers.get()
                sent = link.send(self._message(fetch, buffer), fetch.tag)
                tasks.create_task(_until_sent(sent, buffer, buffers))

    def _message(self, fetch: Fetch, buffer: Bytes) -> Bytes:
        """What answers ``fetch``, in ``buffer``.

        Raises:
            NotOurs: it asks for what no reader of ours asks for.
        """
        try:
            blocks = unpack_ids(fetch.blocks)
        except SchemaError as error:
            raise NotOurs(error.message) from error
        _check_fits(fetch, blocks, self._pool)
        if not self._may_read(fetch.lease_id, fetch.secret):
            clear_header(buffer)
            return buffer[:_HEADER_ONLY]
        message = buffer[: data_at(len(blocks)) + fetch.size]
        _copy(self._pool, blocks, fetch.start, message[data_at(len(blocks)) :])
        write_header(message, self._pool.generations[blocks])
        return message


def _copy(pool: SharedPool, blocks: list[int], start: int, into: Bytes) -> None:
    if len(blocks) > 1:
        rows = into.reshape(len(blocks), pool.block_bytes)
        np.take(pool.slots, blocks, axis=0, out=rows, mode="clip")  # checked before: no buffer
    else:
        into[:] = pool.slots[blocks[0], start : start + len(into)]


def _check_fits(fetch: Fetch, blocks: list[int], pool: SharedPool) -> None:
    if not 0 < len(blocks) <= MAX_BLOCKS or max(blocks) >= pool.num_blocks:
        raise NotOurs("blocks that the pool has not")
    if not 0 < fetch.size <= CHUNK_BYTES:
        raise NotOurs(f"{fetch.size} bytes")
    is_whole = fetch.start == 0 and fetch.size == len(blocks) * pool.block_bytes
    is_part = len(blocks) == 1 and 0 <= fetch.start <= pool.block_bytes - fetch.size
    if not (is_whole or is_part):
        raise NotOurs("bytes that are no blocks")
    if not 0 <= fetch.tag < 1 << 64:
        raise NotOurs("no tag")


async def _until_sent(
    sent: asyncio.Future[None], buffer: Bytes, buffers: asyncio.Queue[Bytes]
) -> None:
    async with asyncio.timeout(_SEND_S):
        await sent
    buffers.put_nowait(buffer)
