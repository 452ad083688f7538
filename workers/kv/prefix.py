"""Prefixes between workers, put together from what a process has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infra.log import Logger
from infra.metrics import Metrics
from infra.transport.reader import KvReader
from workers.engine.engine import Engine
from workers.kv.lending import LentTier
from workers.kv.prefetch import Prefetch
from workers.kv.tiers import Tiers


@dataclass(frozen=True, slots=True)
class _EngineBooks:
    """Read while the engine's thread may change them: one look each, out of date at once."""

    engine: Engine

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        return len(self.engine.blocks.match(hashes))

    def prefill_s(self, start: int, end: int) -> float:
        return self.engine.pace.prefill.seconds(start, end)


def make_prefetch(
    engine: Engine, tiers: Tiers, reader: KvReader, metrics: Metrics, log: Logger
) -> Prefetch | None:
    """What brings prefixes to ``engine``; None without a host tier to bring them to."""
    if tiers.host is None:
        return None
    books = _EngineBooks(engine)
    return Prefetch(tiers.host, tiers.disk, reader, books, engine.info, metrics, log)


def lent_tier(engine: Engine, tiers: Tiers) -> LentTier | None:
    """What ``engine``'s worker lends out of; None: nothing, without a host tier."""
    if tiers.host is None:
        return None
    return LentTier(
        host=tiers.host,
        num_slots=tiers.host.num_slots,
        block_size=engine.info.block_size,
        load=None if tiers.disk is None else tiers.disk.load,
    )
