"""Uvicorn inside a loop that others use too: no signal handlers of its own, sockets bound first.

A socket may be shared: a supervisor binds it and hands it to several processes, which take
connections from one queue. When one of them dies, what it had not taken is served by the others;
while the supervisor lives, the port does not refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from typing import Any

import uvicorn

from infra.http_acceptor import Acceptor
from infra.http_protocol import HttpBounds, bounded
from schemas.errors import ConfigError

LISTEN_FD = "MESH_LISTEN_FD"  # set by a supervisor: the descriptor of a socket that it has bound
_BACKLOG = 1024
_NO_BOUNDS = HttpBounds()


def bind(host: str, port: int, *, key: str) -> socket.socket:
    """A socket bound to ``host``:``port`` (0: any free port), not listening yet.

    Raises:
        ConfigError: the port is in use, not allowed, or the host is none of this machine;
            ``param`` is ``key``.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"{host!r} is no address: {error.strerror}", param=key) from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used: {error}"
        raise ConfigError(f"port {port} on {host} {reason}", param=key) from error
    return bound


def inherited_socket(env: Mapping[str, str] = os.environ) -> socket.socket | None:
    """The socket that a supervisor has bound for this process and its siblings, if one has."""
    return socket.socket(fileno=int(env[LISTEN_FD])) if LISTEN_FD in env else None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def leave(self) -> None:
        """Stop serving."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """Until told to leave. The library looks ten times a second, for the sake of headers and
        limits that are not used here: most of what a process at rest would do."""
        await self._told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the process, see ``infra/process.py``."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing to do: an acceptor takes the connections, no server of the loop."""
        self.servers: list[asyncio.Server] = []
        self.started = True


@contextlib.asynccontextmanager
async def http_server(
    app: Any,
    bound: socket.socket,
    *,
    drain_s: float = 1.0,
    bounds: HttpBounds = _NO_BOUNDS,
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator[None, None]:
    """Serve the ASGI ``app`` on ``bound`` while the block runs.

    Leaving the block closes the listener, gives open responses ``drain_s`` to end, then cancels
    them. The socket is closed in any case.
    """
    bound.listen(_BACKLOG)
    config = uvicorn.Config(
        app,
        http=bounded(bounds),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    config.load()

    def make_protocol() -> asyncio.Protocol:
        return config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=server.server_state, app_state={}
        )

    acceptor = Acceptor(bound, make_protocol, tls=tls, handshake_s=bounds.head_s)
    server = _Server(config)
    with contextlib.closing(bound):
        async with _running(server, acceptor, bound):
            yield


@contextlib.asynccontextmanager
async def _running(
    server: _Server, acceptor: Acceptor, bound: socket.socket
) -> AsyncGenerator[None, None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(acceptor.run(), name="http acceptor")
        tasks.create_task(server.serve(sockets=[bound]), name="http server")
        try:
            yield
        finally:
            acceptor.close()  # at once: others may share the socket
            server.leave()
