"""The bridge's socket."""

from __future__ import annotations

import socket
import sys

from infra.http_server import bind, inherited_socket


def listen(host: str, port: int, stall_s: float) -> socket.socket:
    """A bound socket for HTTP: a supervisor's, shared with others, or our own.

    Connections inherit its time-out: the kernel closes one whose client takes nothing for
    ``stall_s``, which the bridge then sees as a client that left. That costs nothing per token.

    Raises:
        ConfigError: the port is in use, or host or port can't be used.
    """
    bound = inherited_socket() or bind(host, port, key="bridge.port")
    if sys.platform == "linux":
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1000))
    return bound
