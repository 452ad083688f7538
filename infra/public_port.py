"""The address of a mesh's bridges: one port, whatever the number of processes behind it.

Several bridges take connections from one socket, which their supervisor has bound and keeps open:
one that dies, or is restarted, takes no waiting connection with it. A single bridge binds the port
itself, so that the port refuses while nobody is there.
"""

from __future__ import annotations

import socket

from infra.config import BridgeConfig
from infra.http_server import bind
from infra.tls import Tls


class PublicPort:
    """What a supervisor hands to the bridges that it starts.

    Raises:
        ConfigError: the port is in use, or host, port or certificate can't be used.
    """

    def __init__(self, config: BridgeConfig, num_bridges: int) -> None:
        if config.tls_cert:
            Tls(config.tls_cert, config.tls_key)  # better said here than by every bridge
        self._bound: socket.socket | None = bind(config.host, config.port, key="bridge.port")
        self.port: int = self._bound.getsockname()[1]  # of a single one: free a moment ago
        if num_bridges == 1:
            self.close()

    @property
    def fd(self) -> int | None:
        """The socket's descriptor, for several bridges to inherit."""
        return None if self._bound is None else self._bound.fileno()

    def close(self) -> None:
        """From now on the port refuses when the last bridge is gone."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None
