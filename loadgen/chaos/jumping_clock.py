"""``python -m loadgen.chaos.jumping_clock …``: ``mesh …`` with a wall clock that can be moved.

Each SIGUSR1 moves Python's wall clock by an hour forward or, when it is ahead, back. The machine's
own clock stays, and so does the monotonic one, which is what happens when a person or a broken
time service sets the clock. All code of a worker that asks for the time of day is Python.
"""

from __future__ import annotations

import signal
import sys
import time

JUMP_S = 3600


class JumpingClock:
    """Stands in for ``time.time`` and ``time.time_ns``."""

    def __init__(self) -> None:
        self._time, self._time_ns = time.time, time.time_ns
        self._ahead_s = 0

    def install(self) -> None:
        """Replace the module's functions, and jump at SIGUSR1."""
        time.time = lambda: self._time() + self._ahead_s
        time.time_ns = lambda: self._time_ns() + self._ahead_s * 10**9
        signal.signal(signal.SIGUSR1, lambda *_: self.jump())

    def jump(self) -> None:
        """An hour forward, or back."""
        self._ahead_s = 0 if self._ahead_s else JUMP_S

    def remove(self) -> None:
        """The functions as they were."""
        time.time, time.time_ns = self._time, self._time_ns
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


if __name__ == "__main__":
    JumpingClock().install()
    from infra.cli import main

    sys.argv[0] = "mesh"
    main()
