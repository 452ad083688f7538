"""The tiers of one worker's KV, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import structlog

from infra.log import Logger
from infra.metrics import Metrics
from workers.engine.api import BlockStates
from workers.engine.engine import Engine
from workers.kv.api import BlockEvents
from workers.kv.disk import DiskPlan, make_disk
from workers.kv.disk_mover import DiskMover
from workers.kv.eviction import MAX_SHARE, LrfuPolicy
from workers.kv.host_tier import HostPool
from workers.kv.mover import BlockMover
from workers.kv.tally import TierTally


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What an engine has below its own slots. Without memory for a host tier, ``host`` and
    ``mover`` are None, and without a place on disk ``disk``."""

    tally: TierTally
    host: HostPool | None = None
    mover: BlockMover | None = None
    disk: DiskMover | None = None

    def start(self, on_ended: Callable[[], None]) -> None:
        """Let blocks move.

        Args:
            on_ended: called, on a thread of its own, when there is something to ``collect``.
        """
        if self.mover is not None:
            self.mover.on_ended = on_ended
            self.mover.start()
        if self.disk is not None:
            self.disk.start()

    def close(self) -> None:
        """Wait for the copy that runs, and a little for what the disk should still keep; nothing
        moves from then on."""
        if self.mover is not None:
            self.mover.close()
        if self.disk is not None:
            self.disk.close()

    def show(self, metrics: Metrics, device: BlockStates) -> None:
        """Set the gauges of every tier in memory, each from one count of all its blocks, and add
        what has happened to blocks since the last time."""
        self.tally.show(metrics)
        by_tier = {"device": asdict(device)}
        if self.host is not None:
            by_tier["host"] = asdict(self.host.counts())
        for tier, counts in by_tier.items():
            for state, count in counts.items():
                metrics.kv_blocks.labels(tier, state).set(count)
        if self.disk is not None:
            self.disk.tier.show(metrics)


def make_tiers(
    engine: Engine,
    metrics: Metrics | None = None,
    *,
    events: BlockEvents | None = None,
    evicted_share: float = MAX_SHARE,
    disk: DiskPlan | None = None,
    log: Logger | None = None,
) -> Tiers:
    """Give ``engine`` a host tier in the slots that its memory has beyond its own, if it has any,
    and below it a disk; before its first request.

    Raises:
        ConfigError: the disk's quota holds no block.
    """
    tally = TierTally()
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
    below = (
        None
        if disk is None
        else make_disk(
            disk,
            host,
            engine.info.fingerprint,
            tally=tally,
            events=events,
            evicted_share=evicted_share,
            log=log or structlog.get_logger(__name__),
        )
    )
    return Tiers(tally=tally, host=host, mover=mover, disk=below)
