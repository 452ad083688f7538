"""Which transports a process uses, from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from schemas.errors import ConfigError

CHOICES = ("auto", "shm", "ucx", "shm,ucx")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportPlan:
    """What is offered to readers, and read from owners.

    ``ucx_host`` is the address at which UCX works; "" means that it does not. ``lacks_ucx`` says
    that it would, were ``ucxx`` installed.
    """

    shm: bool = True
    ucx_host: str = ""
    ucx_port: int = 0
    lacks_ucx: bool = False


SHM_ONLY = TransportPlan()


def plan_transports(choice: str, host: str, port: int) -> TransportPlan:
    """The plan for settings ``kv_transports``, ``kv_ucx_host`` and ``kv_ucx_port``.

    ``auto`` is shared memory, and UCX as well where an address is given for it; on a machine
    without ``ucxx`` it goes without.

    Raises:
        ConfigError: UCX is asked for by name, and ``ucxx`` is not installed.
    """
    has_ucxx = find_spec("ucxx") is not None
    if choice == "auto":
        usable = host if has_ucxx else ""
        return TransportPlan(ucx_host=usable, ucx_port=port, lacks_ucx=bool(host) and not has_ucxx)
    names = choice.split(",")
    if "ucx" in names and not has_ucxx:
        raise ConfigError(
            "UCX needs ucxx: pip install 'inference-mesh[ucx]'", param="worker.kv_transports"
        )
    ucx_host = (host or LOOPBACK) if "ucx" in names else ""
    return TransportPlan(shm="shm" in names, ucx_host=ucx_host, ucx_port=port)
