"""One reader of other workers' pools for all workers of a process.

Each of their readers would map every owner's pool again, with two descriptors: 200 workers that
read from 100 would have 40,000. This one maps each owner once.
"""

from __future__ import annotations

import time

from infra.transport.handover import PoolReader

_MAX_OWNERS = 1024


class CommonReader(PoolReader):
    """A :class:`PoolReader` that many use and none of them closes; the ``with`` block does.

    Args:
        prune_s: the least time between two looks at which owners are gone: every user asks for
            them.
    """

    def __init__(self, prune_s: float) -> None:
        super().__init__(max_mapped=_MAX_OWNERS)
        self._prune_s = prune_s
        self._pruned_s = time.monotonic()

    def prune(self) -> None:
        """As :class:`PoolReader`, not more often than every ``prune_s``."""
        now_s = time.monotonic()
        if now_s - self._pruned_s >= self._prune_s:
            self._pruned_s = now_s
            super().prune()

    def close(self) -> None:
        """One of many users has ended: nothing is unmapped."""

    def __enter__(self) -> CommonReader:
        return self

    def __exit__(self, *_: object) -> None:
        super().close()
