"""What happened to blocks in each tier, counted."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Literal

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
    """Counts blocks by tier and outcome. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Tier, Outcome]] = Counter()
        self._total = 0
        self._shown: Counter[tuple[Tier, Outcome]] = Counter()
        self._lock = threading.Lock()

    def add(self, tier: Tier, outcome: Outcome, count: int = 1) -> None:
        """``count`` more blocks had this outcome."""
        if not count:
            return
        with self._lock:
            self._counts[tier, outcome] += count
            self._total += count

    def show(self, metrics: Metrics) -> None:
        """Bring what was counted since the last time into ``metrics``, from one thread. A step has
        dozens of outcomes, and a metric takes as long as five of them."""
        with self._lock:
            counts = self._counts.copy()
        for key, count in (counts - self._shown).items():
            metrics.kv_tier_blocks.labels(*key).inc(count)
        self._shown = counts

    @property
    def total(self) -> int:
        """How many outcomes there were in all: when it stays, nothing has happened."""
        return self._total

    def count(self, tier: Tier, outcome: Outcome) -> int:
        """How many had it so far."""
        return self._counts[tier, outcome]
