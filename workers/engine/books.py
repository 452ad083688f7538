"""The engine's books as a whole: that they add up, and which block is what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from workers.engine.active_request import ActiveRequest
from workers.engine.api import BlockStates
from workers.engine.block_pool import BlockPool
from workers.engine.scheduler import Scheduler


def block_states(
    pool: BlockPool, requests: Iterable[ActiveRequest], arriving: Iterable[int]
) -> BlockStates:
    """Every block under the first that fits: leased, arriving, active, cached, free."""
    leased = {
        block
        for active in requests
        if active.group.is_held
        for sequence in active.sequences
        for block in sequence.block_table
    }
    moving = set(arriving) - leased
    counts = pool.counts()
    return BlockStates(
        free=counts.free,
        cached=counts.cached,
        active=counts.active - len(leased) - len(moving),
        leased=len(leased),
        arriving=len(moving),
    )


def check_books(
    pool: BlockPool,
    scheduler: Scheduler,
    requests: Mapping[str, ActiveRequest],
    reservations: Mapping[str, Seq[int]],
) -> None:
    """Raise AssertionError when a block is not accounted for, or a sequence is in no line or in
    two."""
    pool.check_invariants()
    known = list(scheduler.sequences())
    assert len({id(sequence) for sequence in known}) == len(known), "a sequence is in two lines"
    held = Counter(block for blocks in reservations.values() for block in blocks)
    if (arrivals := scheduler.reuse.arrivals) is not None:
        held.update(arrivals.blocks())
    for sequence in known:
        assert sequence.group.key in requests, "a sequence without a request"
        covered = len(sequence.block_table) * pool.block_size
        assert sequence.num_computed_tokens <= covered, "computed tokens without a block"
        held.update(sequence.block_table)
    for block in range(pool.num_blocks):
        assert pool.num_references(block) == held[block], f"block {block} leaked"
    in_line = {id(sequence) for sequence in known}
    for active in requests.values():
        pending = {id(sequence) for sequence in active.group.pending}
        assert active.group.is_held or any(
            id(sequence) in in_line | pending for sequence in active.sequences
        ), f"nothing of {active.key} is in line"
