"""Taking connections from a listening socket that several processes may share.

One connection per turn of the loop: whoever is busy turns slowly and takes fewer. (The loop's own
server takes all that wait in one turn; of 256 connections that came at once to four processes, one
got 182 and one none. This way they were 44 to 97.) What a process that dies had not taken yet
waits in the kernel for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable

from infra.task_scope import task_scope

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROOM_PAUSE_S = 0.5  # until some connection has closed


class Acceptor:
    """Takes connections for :meth:`run`'s while.

    Args:
        bound: listening, or bound only; stays open, for others may have it too.
        tls: for connections that begin with a handshake, which must end within ``handshake_s``.
    """

    def __init__(
        self,
        bound: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        self._bound = bound
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._closed = asyncio.Event()
        self._paused: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Take connections until :meth:`close`; handshakes under way are ended then."""
        self._bound.setblocking(False)
        async with task_scope() as self._tasks:
            self._resume()
            await self._closed.wait()

    def close(self) -> None:
        """Take no more."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._bound)
        self._closed.set()

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._bound, self._take)

    def _take(self) -> None:
        try:
            connection, _ = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was faster, or the client has left again
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._loop.remove_reader(self._bound)
            self._paused = self._loop.call_later(_NO_ROOM_PAUSE_S, self._resume)
            return
        assert self._tasks is not None, "takes while it runs"
        self._tasks.create_task(self._open(connection), name="connection")

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        handshake_s = self._handshake_s if self._tls else None
        # A handshake that fails is a client that can't be told.
        with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
            )
