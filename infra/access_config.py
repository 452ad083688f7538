"""Settings of who may use the bridge. They stand in table ``bridge``, too."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from infra.api_key import HashedKey, hashed_keys
from infra.edge_config import EdgeConfig
from infra.parse import choice, path
from infra.settings import setting
from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig(EdgeConfig):
    """Keys, and whether they are asked for."""

    api_keys: Path | None = setting(
        None, path, "TOML file of API keys, see `mesh keys`; read again when it changes"
    )
    api_key: tuple[HashedKey, ...] = setting(
        (), hashed_keys, "an API key without limits, [TENANT=]KEY or [TENANT=]sha256:HEX; may be "
        "repeated. Others see your command line: better in the environment", many=True, secret=True,
    )  # fmt: skip
    auth: str = setting(
        "auto", choice("auto", "keys", "none"), "who may use the API: those with a key, or all; "
        "auto: keys when there are any, and without them only a loopback host",
    )  # fmt: skip

    @property
    def has_keys(self) -> bool:
        """Whether keys are configured, and so asked for."""
        return self.api_keys is not None or bool(self.api_key)

    def check_access(self) -> None:
        """Nobody opens a mesh to a network by leaving something out.

        Raises:
            ConfigError: the host is no loopback address and there are no keys, or ``auth`` and the
                keys contradict each other.
        """
        if self.auth == "none" and self.has_keys:
            raise ConfigError(
                "auth = none would let everybody in, and keys are configured: leave one of them "
                "out", param="bridge.auth",
            )  # fmt: skip
        if self.has_keys or self.auth == "none":
            return
        if self.auth == "keys":
            raise ConfigError(f"auth = keys, and there are none: {_HOW}", param="bridge.api_keys")
        if not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} is no loopback address, and everybody who reaches it could use the "
                f"models: {_HOW}, or let everybody in with --auth none",
                param="bridge.api_keys",
            )


_HOW = "give keys (--api-keys FILE, made by 'mesh keys new'; or MESH_BRIDGE_API_KEY)"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``; of other names nobody knows, so: no."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
