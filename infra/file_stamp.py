"""Whether a file that people edit has changed since it was read."""

from __future__ import annotations

import os
import time
from pathlib import Path

_FRESH_NS = 2 * 10**9  # a file changed so lately may change again under the same time stamp
_Facts = tuple[int, int, int]


class FileStamp:
    """What a file looked like before it was last read.

    Args:
        path: None: there is no file, and never news of it.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: _Facts | None = None

    @property
    def has_news(self) -> bool:
        """Whether reading it may bring something else than the last time."""
        return self._path is not None and (self._seen is None or self._seen != _facts(self._path))

    def take(self) -> None:
        """It is read right after this."""
        facts = None if self._path is None else _facts(self._path)
        is_settled = facts is not None and facts[2] + _FRESH_NS < time.time_ns()
        self._seen = facts if is_settled else None


def _facts(path: Path) -> _Facts | None:
    """What changes when the file does; None when it can't be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
