"""A histogram for what happens once per token or request.

``prometheus_client``'s own takes two locks and walks its buckets for each value, several times
what the bridge spends on making a token's event. This one is for a single thread: one bisection,
three additions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector


class TallyHistogram(Collector):
    """A histogram without labels; ``observe`` and scraping happen on one thread.

    Args:
        buckets: upper bounds, ascending; the one for everything above is added.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        registry: CollectorRegistry,
        buckets: Sequence[float],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The family as a scrape shows it: counts are those of all values up to a bound."""
        buckets: list[tuple[str, float]] = []
        total = 0
        names = [str(float(bound)) for bound in self._bounds]
        for name, count in zip([*names, "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((name, total))
        yield HistogramMetricFamily(
            self._name, self._documentation, buckets=buckets, sum_value=self._sum
        )
