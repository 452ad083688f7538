"""What else the machine was doing: a figure without this note can't be judged."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

BUSY_LOAD_PER_CORE = 0.5
BUSY_OTHERS_PER_CORE = 0.1


class MachineNote(msgspec.Struct, frozen=True, kw_only=True):
    """Taken before a measurement starts, so that its own load is not in it."""

    num_cores: int  # that this process may use
    load_1min: float  # runnable processes, mean of the last minute
    is_busy: bool  # half the cores or more were taken, or a tenth meanwhile: expect noise
    system: str
    python: str
    others_cores: float | None = None  # what others used meanwhile; None: not measured

    @classmethod
    def now(cls) -> Self:
        """The machine at this moment."""
        num_cores = len(os.sched_getaffinity(0))
        load_1min = os.getloadavg()[0]
        return cls(
            num_cores=num_cores,
            load_1min=round(load_1min, 2),
            is_busy=load_1min >= BUSY_LOAD_PER_CORE * num_cores,
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
        )

    def meanwhile(self, others_cores: float) -> Self:
        """The same, with what an :class:`OthersMeter` found while measuring."""
        is_busy = self.is_busy or others_cores >= BUSY_OTHERS_PER_CORE * self.num_cores
        return msgspec.structs.replace(self, others_cores=round(others_cores, 2), is_busy=is_busy)

    @property
    def text(self) -> str:
        """One line for people."""
        others = (
            "" if self.others_cores is None else f", others used {self.others_cores:.2f} of them"
        )
        noise = " (busy: expect noise)" if self.is_busy else ""
        start = f"load average {self.load_1min:.2f} on {self.num_cores} cores at start"
        return start + others + noise


class OthersMeter:
    """Counts the processor time that others use while this process, alone or with children that
    it has waited for, measures something."""

    def __init__(self) -> None:
        self._started = _cpu_seconds()

    def cores(self) -> float:
        """How many cores' time others have used since this meter was made."""
        before, now = self._started, _cpu_seconds()
        all_s, own_s, wall_s = (later - earlier for earlier, later in zip(before, now, strict=True))
        return max(0.0, all_s - own_s) / max(wall_s, 1e-3)


def _cpu_seconds() -> tuple[float, float, float]:
    """Busy time of the machine's cores, of this process and its children; and the clock."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    ticks = user + nice + system + irq + softirq + steal
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    return ticks / os.sysconf("SC_CLK_TCK"), own_s, time.monotonic()


def cpu_flags(known: Sequence[str]) -> list[str]:
    """Which of ``known`` the processor has, as Linux names them; none where it does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return [flag for flag in known if flag in found.split()]
