"""nats-py's client with what a broker that freezes, dies or refuses needs.

Eight things differ from :class:`nats.aio.client.Client` (2.16):

1. A peer that takes no bytes ends the socket after ``USER_TIMEOUT_MS``, not after 15 minutes.
2. A lost connection is dropped, not closed: closing waits until a frozen peer has read what we
   wrote (nats.py issue 671).
3. What was not written yet when the connection broke is forgotten: nothing said before is heard
   after. Whoever needs more than that asks for an acknowledgement.
4. An error of the server costs the connection, never the client: it reconnects. The library
   closes for good on, for instance, a payload violation.
5. A ping waits its turn behind what was said before. The library's overtakes it, so that a flush
   says nothing of the subscription made just before.
6. The pong of a round trip that was given up is dropped. The library's ends its read loop.
7. A message goes from the socket straight to its callback (``infra.bus.incoming``,
   ``infra.bus.wire``), not through a stream, a queue and two tasks.
8. What is said in one turn of the loop leaves in one write at its end, while the broker keeps up.
   Only when it does not is the library's flusher asked, which waits for the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import PERMISSIONS_ERR

from infra.bus.incoming import Incoming
from infra.bus.wire import Callback, MessageParser, Msg
from schemas.errors import BusUnavailable

USER_TIMEOUT_MS = 3000
_PING = b"PING\r\n"
_SUBJECT = re.compile(r"[^ \t\r\n]+")
_LEAVE_S = 2.0
_RETRY_S = 0.1


class PersistentClient(Client):
    """A client that ends only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self._parser = self._ps = MessageParser(self)
        self._callbacks: dict[int, Callback] = {}  # by subscription
        self.on_crash: Callable[[Exception], None] = _raise
        self._is_write_due = False
        self._to_tell: list[Callable[[], None]] = []  # when what was said is written
        self._loop = asyncio.get_running_loop()

    async def subscribe_direct(self, subject: str, queue: str, callback: Callback) -> Subscription:
        """Subscribe; ``callback`` is called with each message, in order, by whoever reads the
        socket, so it must return at once. What it raises goes to ``on_crash``."""

        async def nothing(message: object) -> None:
            """The library wants something to call; deliver() comes first."""

        # The number that the library gives next: a message may come before it returns.
        number = self._sid + 1
        self._callbacks[number] = callback
        try:
            return await self.subscribe(subject, queue, cb=nothing)
        except BaseException:
            self._callbacks.pop(number, None)
            raise

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._callbacks.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    def deliver(self, sid: int, subject: bytes, reply: bytes, data: bytes, header: bytes) -> bool:
        """A message came; the parser calls this. False: it is for the library."""
        callback = self._callbacks.get(sid)
        if callback is None:
            return False
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        try:
            callback(Msg(subject.decode(), reply.decode(), data, header))
        except Exception as error:
            self.on_crash(error)
        return True

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        """One that the library has put together out of many reads."""
        if not self.deliver(sid, subject, reply, data, headers or b""):
            await super()._process_msg(sid, subject, reply, data, headers)

    def say(self, subject: str, data: bytes, reply: str, head: bytes) -> None:
        """What ``publish`` does, for payloads whose size was checked, in a third of its time.

        Args:
            head: of ``infra.bus.wire.header_block``; empty without headers.

        Raises:
            BadSubjectError: this can't go on the wire.
            OutboundBufferLimitError: not connected.
        """
        if not _SUBJECT.fullmatch(subject) or (reply and not _SUBJECT.fullmatch(reply)):
            raise nats.errors.BadSubjectError
        if not self.is_connected:
            raise nats.errors.OutboundBufferLimitError
        if head:
            line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(data)}\r\n".encode()
            command = b"".join((line, head, data, b"\r\n"))
        else:
            command = f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + b"\r\n"
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(data)
        self._pending.append(command)
        self._pending_data_size += len(command)
        self._write_soon()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not self.is_connected:
            return await super()._flush_pending(force_flush)
        self._write_soon()
        return None

    def _write_soon(self) -> None:
        if not self._is_write_due:
            self._is_write_due = True
            self._loop.call_soon(self.write_pending)

    def write_pending(self) -> None:
        """Write what was said since the last time. Each turn of the loop ends with this anyhow."""
        self._is_write_due = False
        to_tell, self._to_tell = self._to_tell, []
        if not self._pending or not self.is_connected:
            return  # forgotten with the connection
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.transport.get_write_buffer_size():
            if self._flush_queue is not None and self._flush_queue.empty():
                flushed: asyncio.Future[Any] = self._loop.create_future()
                self._flush_queue.put_nowait(flushed)
            return
        writer.transport.write(b"".join(self._pending))
        self._pending = []
        self._pending_data_size = 0
        if not writer.transport.is_closing() and not writer.transport.get_write_buffer_size():
            for callback in to_tell:
                callback()

    def when_written(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the kernel has what was just said: the broker gets it even if this
        process ends then. Never when that does not come at once: the broker reads slowly, or the
        connection broke."""
        self._to_tell.append(callback)

    async def _connect_to_server(self, s: Any) -> None:
        await super()._connect_to_server(s)
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.set_write_buffer_limits(high=0)  # else uvloop waits for the turn's end
        if writer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            writer.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS
            )

    async def _read_loop(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        reader = getattr(self._transport, "_io_reader", None)
        if writer is not None and reader is not None:  # else it is no stream
            Incoming.stand_before(writer, reader, self, self._parser)
        await super()._read_loop()

    def _connect_command(self) -> bytes:
        """CONNECT leaves in one packet with the PING that the library sends next: a broker that
        refuses closes after CONNECT, and a PING that came then would turn its words into a reset.
        """
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and hasattr(socket, "TCP_CORK"):
            _cork(writer, True)
            self._loop.call_soon(_cork, writer, False)
        return super()._connect_command()

    async def _attempt_reconnect(self) -> None:
        self.drop_connection()
        await super()._attempt_reconnect()

    async def _process_err(self, err_msg: str) -> None:
        error = nats.errors.Error(f"nats: {err_msg.strip(chr(39))}")
        if PERMISSIONS_ERR in err_msg:
            await self._error_cb(error)
        else:
            await self._process_op_err(error)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        self._pongs.append(future or self._loop.create_future())
        await self._send_command(_PING)
        await self._flush_pending()

    async def round_trip(self) -> None:
        """Wait until the broker has taken everything said so far, or the connection broke.

        In place of ``flush``, whose ``wait_for`` can swallow a cancellation (Python 3.11).
        """
        pong: asyncio.Future[Any] = self._loop.create_future()
        await self._send_ping(pong)
        await pong

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = self._loop.create_future()
        await super()._process_pong()

    async def leave(self) -> None:
        """Close for good; what is still unwritten gets two seconds."""
        try:
            async with asyncio.timeout(_LEAVE_S):
                await self.close()
        except (TimeoutError, OSError):
            self.drop_connection()

    def drop_connection(self) -> None:
        """Forget unwritten bytes and end the socket without waiting for the peer."""
        self._pending.clear()
        self._pending_data_size = 0
        for pong in self._pongs:
            if not pong.done():
                pong.set_result(None)
        self._pongs.clear()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


def _raise(error: Exception) -> None:
    raise error


def _cork(writer: asyncio.StreamWriter, is_corked: bool) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, is_corked)


class ClientEvents(Protocol):
    """What a connected client tells; each returns at once."""

    async def failed(self, error: Exception) -> None:
        """A connection error, or an error word of the broker."""

    def crashed(self, error: Exception) -> None:
        """A callback of a subscription raised."""

    async def disconnected(self) -> None:
        """The connection broke."""

    async def reconnected(self) -> None:
        """It stands again, and so do its subscriptions."""

    async def closed(self) -> None:
        """It was told to leave."""


async def open_client(
    urls: Sequence[str],
    events: ClientEvents,
    *,
    role: str,
    name: str,
    user: str | None,
    password: str | None,
    timeout_s: float,
) -> PersistentClient:
    """Connect, trying again until ``timeout_s`` is over.

    Raises:
        BusUnavailable: not reached in time, or refused (at once); says where and why, never with
            which password.
    """
    first = _FirstConnect(events)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                client = first.client = PersistentClient()
                client.on_crash = events.crashed
                try:
                    await client.connect(
                        list(urls),
                        name=name,
                        user=user,
                        password=password,
                        max_reconnect_attempts=-1,
                        reconnect_time_wait=_RETRY_S,  # type: ignore[arg-type]
                        connect_timeout=1,
                        ping_interval=1,
                        max_outstanding_pings=2,
                        pending_size=0,
                        dont_randomize=True,
                        inbox_prefix=f"_INBOX_{role}",
                        error_cb=first.failed,
                        disconnected_cb=first.disconnected,
                        reconnected_cb=events.reconnected,
                        closed_cb=events.closed,
                    )
                    first.is_done = True
                    return client
                except OSError as error:  # the library's clean-up after a reset lets it out
                    first.error = error
                    await client.leave()
                    await asyncio.sleep(_RETRY_S)
    except (TimeoutError, nats.errors.Error) as error:
        await first.client.leave()
        reason = error if _is_refusal(error) else first.error or error  # a reset may come before it
        raise BusUnavailable(
            f"no connection to the bus at {places(urls)}: {_reason(reason)}"
        ) from error


class _FirstConnect:
    """Errors before the first connection: kept as the reason; a refusal ends the attempts."""

    def __init__(self, events: ClientEvents) -> None:
        self._events = events
        self.client = PersistentClient()
        self.error: Exception | None = None
        self.is_done = False

    async def failed(self, error: Exception) -> None:
        if self.is_done:
            await self._events.failed(error)
            return
        self.error = error
        if _is_refusal(error):
            raise error

    async def disconnected(self) -> None:
        if self.is_done:
            await self._events.disconnected()


def places(urls: Sequence[str]) -> str:
    """``host:port, …``: urls without what is secret in them."""
    parts = [urlsplit(url if "://" in url else f"nats://{url}") for url in urls]
    return ", ".join(f"{part.hostname}:{part.port or 4222}" for part in parts)


def _is_refusal(error: Exception) -> bool:
    return "authorization" in str(error).lower()


def _reason(error: Exception) -> str:
    if _is_refusal(error):
        return "wrong user or password"
    if isinstance(error, OSError) and error.strerror:
        return f"not reachable ({error.strerror})"
    return str(error) or ("no answer" if isinstance(error, TimeoutError) else type(error).__name__)
