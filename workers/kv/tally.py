"""What happened to blocks in each tier, counted."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

from prometheus_client import Counter as Counted

from infra.metrics import Metrics
from workers.kv.api import Tier

Outcome = Literal[
    "hit",  # wanted for a prompt, and found
    "miss",  # wanted, and in no tier of this worker: counted for the device alone
    "stored",  # came in: computed, demoted from above, or brought from elsewhere
    "promoted",  # copied one tier up
    "evicted",  # made room; a lower tier has it
    "dropped",  # made room, or found none; no lower tier has it
    "corrupt",  # its bytes were wrong
    "failed",  # the disk did not read or write it
]


class TierTally:
    """Counts blocks by tier and outcome. Thread-safe.

    Args:
        metrics: where the same is shown; None: nowhere.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._counts: Counter[tuple[Tier, Outcome]] = Counter()
        self._total = 0
        self._metrics = metrics
        self._shown: dict[tuple[Tier, Outcome], Counted] = {}  # to find one by labels takes longer
        self._lock = threading.Lock()

    def add(self, tier: Tier, outcome: Outcome, count: int = 1) -> None:
        """``count`` more blocks had this outcome."""
        if not count:
            return
        key = (tier, outcome)
        with self._lock:
            self._counts[key] += count
            self._total += count
        if self._metrics is not None:
            shown = self._shown.get(key)
            if shown is None:
                shown = self._shown[key] = self._metrics.kv_tier_blocks.labels(*key)
            shown.inc(count)

    @property
    def total(self) -> int:
        """How many outcomes there were in all: when it stays, nothing has happened."""
        return self._total

    def count(self, tier: Tier, outcome: Outcome) -> int:
        """How many had it so far."""
        return self._counts[tier, outcome]
