"""nats-py's client with what a broker that freezes, dies or refuses needs.

Six things differ from :class:`nats.aio.client.Client` (2.16):

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
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.protocol.parser import PERMISSIONS_ERR

from schemas.errors import BusUnavailable

USER_TIMEOUT_MS = 3000
_PING = b"PING\r\n"
_LEAVE_S = 2.0
_RETRY_S = 0.1


class PersistentClient(Client):
    """A client that ends only when it is told to."""

    async def _connect_to_server(self, s: Any) -> None:
        await super()._connect_to_server(s)
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            writer.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS
            )

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
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(_PING)
        await self._flush_pending()

    async def round_trip(self) -> None:
        """Wait until the broker has taken everything said so far, or the connection broke.

        In place of ``flush``, whose ``wait_for`` can swallow a cancellation (Python 3.11).
        """
        pong: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._send_ping(pong)
        await pong

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
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


class ClientEvents(Protocol):
    """What a connected client tells; each returns at once."""

    async def failed(self, error: Exception) -> None:
        """A connection error, an error word of the broker, or an exception of a callback."""

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
                        disconnected_cb=events.disconnected,
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
        raise BusUnavailable(
            f"no connection to the bus at {places(urls)}: {_reason(first.error or error)}"
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
