"""Freezing a process for sure: when ``kill`` returns a signal is only asked for, and on a busy
machine the threads of the process may run on for a while."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def freeze(pid: int) -> None:
    """SIGSTOP; none of its threads runs when this returns.

    Raises:
        TimeoutError: one still does after ten seconds.
    """
    os.kill(pid, signal.SIGSTOP)
    ends_s = time.monotonic() + 10
    while not all(_is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{pid} does not stand still")
        time.sleep(0.001)


def _is_stopped(task: Path) -> bool:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended
    return state in "Tt"
