"""The processes behind a server on this host, and the CPU time that each kind of them spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import psutil

from schemas.errors import ConfigError

_ROLES = frozenset({"control", "worker", "bridge"})
_BROKER = "nats-server"


class ProcessGroup:
    """Processes by the kind of work they do.

    Raises:
        ConfigError: a process id that nobody has.
    """

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        try:
            self._processes = {
                kind: [psutil.Process(pid) for pid in of_kind] for kind, of_kind in pids.items()
            }
        except psutil.NoSuchProcess as error:
            raise ConfigError(f"there is no process {error.pid}", param="pid") from error

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the kinds."""
        return tuple(self._processes)

    def cpu_s(self) -> dict[str, float]:
        """User and system time so far, of each kind.

        Raises:
            ConfigError: a process has ended.
        """
        try:
            return {
                kind: sum(_cpu_s(process) for process in of_kind)
                for kind, of_kind in self._processes.items()
            }
        except psutil.NoSuchProcess as error:
            raise ConfigError(f"process {error.pid} has ended", param="pid") from error

    def since(self, before_s: Mapping[str, float]) -> dict[str, float]:
        """What was spent since :meth:`cpu_s` gave ``before_s``."""
        return {kind: now_s - before_s[kind] for kind, now_s in self.cpu_s().items()}


def processes_of_mesh(pid: int) -> ProcessGroup:
    """``mesh up``, process ``pid``, and its children: supervisor, broker, control, worker, bridge.

    Raises:
        ConfigError: there is no such process.
    """
    try:
        supervisor = psutil.Process(pid)
        found: dict[str, list[int]] = {"supervisor": [pid]}
        for child in supervisor.children(recursive=True):
            found.setdefault(_kind_of(child), []).append(child.pid)
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"there is no process {error.pid}", param="pid") from error
    return ProcessGroup(found)


def pids_by_kind(pairs: Sequence[str]) -> dict[str, list[int]]:
    """``["worker=12", "worker=13"]`` as a mapping.

    Raises:
        ConfigError: one that is not of the form NAME=PID.
    """
    found: dict[str, list[int]] = {}
    for pair in pairs:
        kind, _, number = pair.partition("=")
        if not kind or not number.isdigit():
            raise ConfigError(f"{pair!r} is not of the form NAME=PID", param="pid")
        found.setdefault(kind, []).append(int(number))
    return found


def _kind_of(process: psutil.Process) -> str:
    if process.name() == _BROKER:
        return "broker"
    return next((word for word in process.cmdline() if word in _ROLES), "other")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
