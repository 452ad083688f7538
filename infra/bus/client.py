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
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.protocol.parser import PERMISSIONS_ERR

USER_TIMEOUT_MS = 3000
_PING = b"PING\r\n"


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
        """Wait until the broker has taken everything said so far.

        In place of ``flush``, whose ``wait_for`` can swallow a cancellation (Python 3.11).
        """
        pong: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await self._send_ping(pong)
        await pong

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def drop_connection(self) -> None:
        """Forget unwritten bytes and end the socket without waiting for the peer."""
        self._pending.clear()
        self._pending_data_size = 0
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
