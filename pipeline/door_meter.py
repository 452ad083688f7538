"""What the waiting room shows of itself: how many wait, for how long, and who was let go."""

from __future__ import annotations

from infra.metrics import Metrics
from infra.steady import Counter, Gauge
from pipeline.fair_queue import OUTPUT_WEIGHT, Ticket

MAX_TENANTS = 32  # with a label of their own; those that come later are counted as OTHER
OTHER = "other"


class DoorMeter:
    """Counts for one control process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tenants: dict[str, tuple[Counter, Counter]] = {}
        self._waiting: dict[tuple[str, int], Gauge] = {}  # by pool and level

    def went(self, ticket: Ticket) -> None:
        """It is let go to the workers."""
        requests, tokens = self._of(ticket.tenant)
        requests.inc()
        tokens.inc(max(0.0, ticket.num_uncached + OUTPUT_WEIGHT * ticket.expected_tokens))

    def waits(self, ticket: Ticket) -> None:
        """It begins to wait."""
        self._waiting_like(ticket).inc()

    def left(self, ticket: Ticket, waited_s: float) -> None:
        """It waits no longer, however that ended."""
        self._waiting_like(ticket).dec()
        self._metrics.waiting_seconds.observe(waited_s)

    def _waiting_like(self, ticket: Ticket) -> Gauge:
        kind = ticket.served, ticket.level
        found = self._waiting.get(kind)
        if found is None:
            found = self._waiting[kind] = self._metrics.waiting_requests.labels(*kind)
        return found

    def _of(self, tenant: str) -> tuple[Counter, Counter]:
        found = self._tenants.get(tenant)
        if found is None:
            label = tenant if len(self._tenants) < MAX_TENANTS else OTHER
            found = (
                self._metrics.tenant_requests.labels(label),
                self._metrics.tenant_tokens.labels(label),
            )
            if label is not OTHER:
                self._tenants[tenant] = found
        return found
