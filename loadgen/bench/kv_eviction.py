"""Section ``eviction`` of ``mesh bench kv``: our policy against LRU on synthetic traces.

Both run in the same simulated pool, a tenth of the working set, and take children before parents.
A hit is a block of a prompt that need not be computed: one of the leading blocks that are there.
No clock and no threads: the figures are the same on every machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from loadgen.bench.kv import KvPlan, KvSection
from loadgen.bench.kv_traces import KINDS, Request, make_trace, working_set
from workers.kv.api import EvictionPolicy
from workers.kv.eviction import LrfuPolicy, LruPolicy

POOL_SHARE = 0.1
SEEDS = (1, 2, 3)
NUM_REQUESTS = 2000
_LEAST_RATE = 0.001  # to divide by


def measure(plan: KvPlan) -> KvSection:
    """``eviction_hit_rate`` is ours ÷ LRU on the first kind of trace; those of all are below."""
    by_kind = compare_all()
    lost = [kind for kind, found in by_kind.items() if found["worst"] < 1]
    return KvSection(
        figures={"eviction_hit_rate": by_kind[KINDS[0]]["ratio"], "eviction_by_trace": by_kind},
        notes=(
            f"eviction: trace {KINDS[0]!r}, pool {POOL_SHARE:.0%} of the working set, median over "
            f"{len(SEEDS)} seeds; with some seed LRU is better on: {', '.join(lost) or 'none'}",
        ),
    )


def compare_all(
    seeds: Sequence[int] = SEEDS, num_requests: int = NUM_REQUESTS
) -> dict[str, Mapping[str, float]]:
    """Per kind of trace: hit rates of both, medians over seeds; their ratio, and the worst one."""
    return {kind: _compare(kind, seeds, num_requests) for kind in KINDS}


def _compare(kind: str, seeds: Sequence[int], num_requests: int) -> Mapping[str, float]:
    ours, lru = [], []
    for seed in seeds:
        trace = make_trace(kind, seed, num_requests)
        num_blocks = max(1, round(POOL_SHARE * working_set(trace)))
        ours.append(hit_rate(LrfuPolicy(), trace, num_blocks))
        lru.append(hit_rate(LruPolicy(), trace, num_blocks))
    ratios = [1.0 if a == b else a / max(b, _LEAST_RATE) for a, b in zip(ours, lru, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "worst": round(min(ratios), 3),
        "ours": round(statistics.median(ours), 4),
        "lru": round(statistics.median(lru), 4),
    }


def hit_rate(policy: EvictionPolicy, trace: Sequence[Request], num_blocks: int) -> float:
    """The share of all prompt blocks that a pool of ``num_blocks`` had when they were asked for."""
    pool = _Pool(policy, num_blocks)
    num_asked = num_hits = 0
    for request in trace:
        num_asked += request.num_prompt
        num_hits += pool.serve(request)
    return num_hits / num_asked


class _Pool:
    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self._policy = policy
        self._num_blocks = num_blocks
        self._held: set[bytes] = set()

    def serve(self, request: Request) -> int:
        """Compute what is missing and keep it; how many leading blocks were there."""
        names = [block.block_hash for block in request.blocks[: request.num_blocks]]
        num_hits = 0
        while num_hits < request.num_prompt and names[num_hits] in self._held:
            self._policy.used(names[num_hits])
            num_hits += 1
        pinned = set(names[:num_hits])
        for block in request.blocks[num_hits : request.num_blocks]:
            if block.block_hash not in self._held and not self._has_room(pinned):
                break
            self._held.add(block.block_hash)
            self._policy.added(block)
            pinned.add(block.block_hash)
        return num_hits

    def _has_room(self, pinned: set[bytes]) -> bool:
        if len(self._held) < self._num_blocks:
            return True
        victims = self._policy.victims(1, pinned)
        for name in victims:
            self._held.remove(name)
            self._policy.removed(name)
        return bool(victims)
