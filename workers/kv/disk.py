"""The disk below a worker's host tier, put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infra.config import WorkerConfig
from infra.log import Logger
from schemas.errors import ConfigError
from workers.kv.api import BlockEvents
from workers.kv.disk_mover import DiskMover
from workers.kv.disk_tier import SLOW_S, DirectoryTier
from workers.kv.eviction import LrfuPolicy
from workers.kv.host_tier import HostPool
from workers.kv.store import BlockStore
from workers.kv.tally import TierTally


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlan:
    """Where one worker keeps blocks over restarts, and how many bytes of them. A block that takes
    longer than ``slow_s`` gives the disk a rest."""

    directory: Path
    quota_bytes: int
    slow_s: float = SLOW_S

    @classmethod
    def of(cls, config: WorkerConfig) -> DiskPlan | None:
        """Each worker name has a folder of its own; None: nothing is kept."""
        if config.kv_disk is None:
            return None
        return cls(directory=config.kv_disk / config.name, quota_bytes=config.kv_disk_quota)


def make_disk(
    plan: DiskPlan,
    host: HostPool,
    fingerprint: str,
    *,
    tally: TierTally,
    events: BlockEvents | None,
    evicted_share: float,
    log: Logger,
) -> DiskMover:
    """Put a disk below ``host``. Does not touch it yet.

    Raises:
        ConfigError: the quota holds no block.
    """
    store = BlockStore(plan.directory / fingerprint, fingerprint, host.memory.block_bytes)
    if plan.quota_bytes < store.file_bytes:
        raise ConfigError(
            f"{plan.quota_bytes} bytes hold no block of {store.file_bytes}",
            param="worker.kv_disk_quota",
        )
    disk = DirectoryTier(
        plan.directory,
        store,
        plan.quota_bytes,
        policy=LrfuPolicy(max_share=evicted_share),
        events=events,
        tally=tally,
        log=log,
        slow_s=plan.slow_s,
    )
    mover = DiskMover(host, disk, tally, log)
    host.is_below = disk.has
    host.on_stored = mover.enqueue
    host.on_removed = disk.note_use
    return mover
