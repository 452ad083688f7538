"""The tiers of one worker's KV, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from infra.metrics import Metrics
from workers.engine.api import BlockStates
from workers.engine.engine import Engine
from workers.kv.api import BlockEvents
from workers.kv.eviction import MAX_SHARE, LrfuPolicy
from workers.kv.host_tier import HostPool
from workers.kv.mover import BlockMover
from workers.kv.tally import TierTally


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What an engine has below its own slots. Without memory for a host tier, ``host`` and
    ``mover`` are None."""

    tally: TierTally
    host: HostPool | None = None
    mover: BlockMover | None = None

    def start(self, on_ended: Callable[[], None]) -> None:
        """Let blocks move.

        Args:
            on_ended: called, on a thread of its own, when there is something to ``collect``.
        """
        if self.mover is not None:
            self.mover.on_ended = on_ended
            self.mover.start()

    def close(self) -> None:
        """Wait for the copy that runs; nothing moves from then on."""
        if self.mover is not None:
            self.mover.close()

    def show(self, metrics: Metrics, device: BlockStates) -> None:
        """Set the gauges of every tier in memory, each from one count of all its blocks."""
        states = {("device", name): getattr(device, name) for name in BlockStates.__slots__}
        if self.host is not None:
            counts = self.host.counts()
            states |= {("host", name): getattr(counts, name) for name in counts.__slots__}
        for (tier, state), count in states.items():
            metrics.kv_blocks.labels(tier, state).set(count)


def make_tiers(
    engine: Engine,
    metrics: Metrics | None = None,
    *,
    events: BlockEvents | None = None,
    evicted_share: float = MAX_SHARE,
) -> Tiers:
    """Give ``engine`` a host tier in the slots that its memory has beyond its own, if it has any;
    before its first request."""
    tally = TierTally(metrics)
    num_device = engine.info.num_blocks
    if engine.pool.num_blocks == num_device:
        engine.use_tiers(None, tally, events)
        return Tiers(tally=tally)
    host = HostPool(
        engine.pool,
        num_device,
        policy=LrfuPolicy(max_share=evicted_share),
        tally=tally,
        events=events,
    )
    mover = BlockMover(host, engine.runner, tally, engine.pace)
    engine.use_tiers(mover, tally, events)
    return Tiers(tally=tally, host=host, mover=mover)
