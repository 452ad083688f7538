"""Settings of the bridge towards its clients: how many processes, TLS, CORS, bounds.

They stand in table ``bridge`` with the rest of ``BridgeConfig``, which is made of this class.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.parse import number, origins, path, size_bytes, text, whole
from infra.settings import setting
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """What stands between the network and the bridge."""

    host: str = setting("127.0.0.1", text, "address to listen on")
    port: int = setting(8000, whole(0, 65535), "port to listen on; 0: any free one")
    processes: int = setting(
        1, whole(1, 256), "bridge processes behind the one port, each with a health port of its own"
    )
    tls_cert: Path | None = setting(
        None, path, "PEM file with the certificate chain: serve HTTPS; read again on SIGHUP"
    )
    tls_key: Path | None = setting(
        None, path, "PEM file with the certificate's key; default: it stands in tls_cert"
    )
    cors_origins: tuple[str, ...] = setting(
        (), origins, "an origin whose pages may call from a browser, https://…; may be repeated; "
        "* for any, then without credentials", flag="--cors-origin", many=True,
    )  # fmt: skip
    max_body_bytes: int = setting(4 * 2**20, size_bytes(1024), "larger bodies are refused with 413")
    max_header_bytes: int = setting(
        2**16, size_bytes(1024), "request line and headers over this are refused with 431"
    )
    max_open_requests: int = setting(
        4096, whole(1, 1_000_000), "requests at once; more are refused with 429"
    )
    max_waiting_deltas: int = setting(
        4096, whole(16, 1_000_000), "pieces of one answer that may wait for a slow client; over "
        "that it is cut and its request cancelled",
    )  # fmt: skip
    max_connections: int = setting(
        8192, whole(1, 1_000_000), "connections of one process; more are refused with 503"
    )
    header_timeout_s: float = setting(
        10.0, number(0.1, 600), "how long a request's headers, or a TLS handshake, may take; then "
        "408",
    )  # fmt: skip
    body_timeout_s: float = setting(
        30.0, number(0.1, 600), "how long a request's body may take; then 408"
    )
    idle_timeout_s: float = setting(
        75.0, number(0.1, 3600), "a connection without a request for so long is closed"
    )

    def check_edge(self) -> None:
        """What the settings must be together.

        Raises:
            ConfigError: a key without a certificate, or ``*`` beside other origins.
        """
        if self.tls_key and not self.tls_cert:
            raise ConfigError("a key without a certificate", param="bridge.tls_cert")
        if "*" in self.cors_origins and len(self.cors_origins) > 1:
            raise ConfigError(
                "* stands for all origins: give it alone", param="bridge.cors_origins"
            )

    @property
    def scheme(self) -> str:
        """Of the bridge's address."""
        return "https" if self.tls_cert else "http"
