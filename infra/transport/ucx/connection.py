"""A reader's end of one connection: asks for chunks, and says when they are there."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from infra.transport.ucx.link import UcxContext, UcxLink
from infra.transport.ucx.turns import Turns
from infra.transport.ucx.wire import (
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
)
from schemas.codec import pack_ids
from schemas.errors import KvLost
from schemas.kv import KvHandle

STALLED_S = 3.0  # without what was asked for: the owner is frozen, or cut off
_ENTER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one message brings: ``blocks``, which are the handle's from ``first`` on, or of a
    single one ``size`` bytes from ``start`` on."""

    first: int
    blocks: list[int]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A message that will come. ``buffer`` is UCX's until ``ended``."""

    buffer: Bytes
    message: Bytes  # its part that is waited for
    ended: asyncio.Future[None]


class Connection:
    """To one owner.

    Its few buffers are given out in the order in which they are asked for: transfers that share
    the connection take turns, chunk by chunk.
    """

    def __init__(
        self,
        link: UcxLink,
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: Welcome,
    ) -> None:
        self.num_blocks = welcome.num_blocks
        self.block_bytes = welcome.block_bytes
        self._link = link
        self._stream = stream
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(WINDOW, MESSAGE_BYTES)
        self._next_tag = secrets.randbits(63)
        self._heard_s = self._loop.time()
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._link.num_under_way

    @property
    def is_usable(self) -> bool:
        """Whether a transfer may begin: the owner is there and not silent."""
        is_silent = self._loop.time() - self._heard_s > STALLED_S
        return not (self._is_closed or (is_silent and not self.is_idle))

    async def watch(self) -> None:
        """Until the owner is gone or the connection closed; it is closed then."""
        try:
            await self._stream.read(1)  # an owner says nothing after its welcome
        except OSError:
            pass
        finally:
            self.close("the owner is gone")

    def close(self, reason: str) -> None:
        """End it and every transfer on it; once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        self._turns.end(KvLost(reason))
        self._link.close(reason)
        self._writer.transport.abort()  # what was not sent is of no use

    async def ask(self, handle: KvHandle, chunk: Chunk) -> Asked:
        """Ask for a chunk when it is our turn; it has to be given back by ``done_with``.

        Raises:
            KvLost: the connection is at its end.
        """
        buffer = await self._turns.take()
        clear_header(buffer)
        if self.is_idle:
            self._heard_s = self._loop.time()  # silence counts from the first question on
        message = buffer[: data_at(len(chunk.blocks)) + chunk.size]
        self._next_tag = (self._next_tag + 1) % (1 << 63)
        ended = self._link.receive(message, self._next_tag)
        ended.add_done_callback(self._hear)
        fetch = Fetch(
            lease_id=handle.lease_id,
            secret=handle.secret,
            tag=self._next_tag,
            blocks=pack_ids(chunk.blocks),
            start=chunk.start,
            size=chunk.size,
        )
        self._writer.write(frame(fetch))
        return Asked(buffer, message, ended)

    async def arrival(self, asked: Asked) -> None:
        """Wait for it.

        Raises:
            KvLost: it does not come, or not in time: then the connection is closed.
        """
        await asyncio.wait([asked.ended], timeout=STALLED_S)  # cancelled, it goes on
        if not asked.ended.done():
            self.close(f"nothing came for {STALLED_S:g} s")
        asked.ended.result()

    def done_with(self, asked: Asked) -> None:
        """Its buffer is for the next, as soon as UCX does not write into it any more."""
        if asked.ended.done():
            self._turns.give_back(asked.buffer)
        else:
            asked.ended.add_done_callback(lambda _: self._turns.give_back(asked.buffer))

    def _hear(self, _: object) -> None:
        self._heard_s = self._loop.time()


async def connect(host: str, port: int, handle: KvHandle, context: UcxContext) -> Connection:
    """Open a connection by showing the handle's lease.

    Raises:
        KvLost: nobody is there, or does not let us in.
    """
    link = UcxLink(context)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_ENTER_S):
            stream, writer = await asyncio.open_connection(host, port)
            enter = Enter(lease_id=handle.lease_id, secret=handle.secret, address=link.address)
            writer.write(frame(enter))
            welcome = await read_frame(stream, Welcome)
        link.connect(welcome.address)
    except EOFError as error:
        _end(link, writer)
        raise KvLost(f"{handle.owner} gives nothing for lease {handle.lease_id}") from error
    except (OSError, NotOurs, TimeoutError) as error:
        _end(link, writer)
        raise KvLost(f"{handle.owner} can't be reached: {str(error) or 'no answer'}") from error
    except BaseException:
        _end(link, writer)
        raise
    return Connection(link, stream, writer, welcome)


def _end(link: UcxLink, writer: asyncio.StreamWriter | None) -> None:
    link.close()
    if writer is not None:
        writer.transport.abort()  # what was not sent is of no use
