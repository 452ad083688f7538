"""What else the machine was doing: a figure without this note can't be judged."""

from __future__ import annotations

import os
import platform
from typing import Self

import msgspec

BUSY_LOAD_PER_CORE = 0.5


class MachineNote(msgspec.Struct, frozen=True, kw_only=True):
    """Taken before a measurement starts, so that its own load is not in it."""

    num_cores: int  # that this process may use
    load_1min: float  # runnable processes, mean of the last minute
    is_busy: bool  # half the cores or more were taken: expect noise
    system: str
    python: str

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

    @property
    def text(self) -> str:
        """One line for people."""
        noise = " (busy: expect noise)" if self.is_busy else ""
        return f"load average {self.load_1min:.2f} on {self.num_cores} cores at start{noise}"
