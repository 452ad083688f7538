"""``python -m loadgen.chaos.bad_disk full|slow …``: ``mesh …`` whose KV files are on a bad disk.

Each SIGUSR1 lets the disk go bad or, when it is, well again. Only what the disk tier reads and
writes is struck: logs and the rest of the worker have a disk that works.

    full   nothing can be written
    slow   every read and write takes three seconds
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from workers.kv import store

SLOW_S = 3.0  # more than the tier bears
KINDS = ("full", "slow")


class BadDisk:
    """Stands in for the module ``os`` in :mod:`workers.kv.store`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._is_bad = False

    def install(self) -> None:
        """Take the module's place, and change at SIGUSR1."""
        vars(store)["os"] = self
        signal.signal(signal.SIGUSR1, lambda *_: self.change())

    def remove(self) -> None:
        """The module as it was."""
        vars(store)["os"] = os
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def change(self) -> None:
        """Bad, or well again."""
        self._is_bad = not self._is_bad

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def writev(self, descriptor: int, buffers: Any) -> int:
        """``os.writev`` on this disk."""
        if self._is_bad and self._kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._slowly(os.writev, descriptor, buffers)

    def readv(self, descriptor: int, buffers: Any) -> int:
        """``os.readv`` on this disk."""
        return self._slowly(os.readv, descriptor, buffers)

    def _slowly(self, call: Callable[[int, Any], int], descriptor: int, buffers: Any) -> int:
        if self._is_bad and self._kind == "slow":
            time.sleep(SLOW_S)
        return call(descriptor, buffers)


if __name__ == "__main__":
    BadDisk(sys.argv.pop(1)).install()
    from infra.cli import main

    sys.argv[0] = "mesh"
    main()
