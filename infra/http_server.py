"""Uvicorn inside a loop that others use too: no signal handlers of its own, sockets bound first."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncGenerator, Generator
from typing import Any

import uvicorn

from schemas.errors import ConfigError

_BACKLOG = 1024


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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals belong to the process, see ``infra/process.py``."""
        yield


@contextlib.asynccontextmanager
async def http_server(
    app: Any, bound: socket.socket, *, drain_s: float = 1.0
) -> AsyncGenerator[None, None]:
    """Serve the ASGI ``app`` on ``bound`` while the block runs.

    Leaving the block closes the listener, gives open responses ``drain_s`` to end, then cancels
    them. The socket is closed in any case.
    """
    bound.listen(_BACKLOG)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            timeout_keep_alive=75,
        )
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[bound]), name="http server")
        try:
            yield
        finally:
            server.should_exit = True
