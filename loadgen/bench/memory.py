"""How much memory the processes of a mesh on this host have, by kind."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from loadgen.chaos.mesh import ChaosMesh

_MB = 1e6


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident bytes of all processes of each kind, at a monotonic time."""

    at_s: float
    rss_bytes: Mapping[str, int]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that were there."""
        return tuple(self.rss_bytes)

    def mb(self, kind: str) -> float:
        """Megabytes of one kind."""
        return round(self.rss_bytes.get(kind, 0) / _MB, 1)


class Memory:
    """The processes that a mesh has now; ones that come later are not looked at."""

    def __init__(self, mesh: ChaosMesh) -> None:
        kinds = ("control", "bridge", "worker")
        pids = {kind: [beat.pid for beat in mesh.present(kind)] for kind in kinds}
        pids["broker"] = [mesh.broker.pid]
        self._processes = {kind: [psutil.Process(pid) for pid in pids[kind]] for kind in pids}

    def sample(self) -> MemorySample:
        """Now.

        Raises:
            psutil.NoSuchProcess: one has ended.
        """
        rss = {
            kind: sum(process.memory_info().rss for process in processes)
            for kind, processes in self._processes.items()
        }
        return MemorySample(time.monotonic(), rss)
