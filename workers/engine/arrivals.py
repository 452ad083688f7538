"""Blocks on their way from the host tier into the pool.

A promotion belongs to no sequence. Its slots are referenced by the books here while they are being
filled; then they are registered and the references end, so the blocks are cached, and whoever
waited for them finds them as it would find any others. Whatever happens to that sequence
meanwhile, nothing is given back too early or twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.block_pool import BlockPool
from workers.engine.sequence import Sequence
from workers.kv.mover import BlockMover, Promotion

_MOST_PROMOTIONS = 2  # for one sequence: before its turn, and again when that was evicted


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Arrival:
    sequence: Sequence
    blocks: Seq[int]  # of the prefix, in order: those that were in the pool, and those to be filled


class Arrivals:
    """Promotions under way into one pool; used by the engine's thread."""

    def __init__(self, pool: BlockPool, mover: BlockMover) -> None:
        self._pool = pool
        self._mover = mover
        self._arrivals: dict[Promotion, _Arrival] = {}
        self._coming: set[bytes] = set()

    def bring(self, sequence: Sequence, num_blocks: int) -> bool:
        """See to it that what the host tier has of the sequence's first ``num_blocks`` full blocks
        gets into the pool, where that is faster than computing it.

        Returns:
            Whether something is on its way.
        """
        pool = self._pool
        hashes = sequence.prefix_hashes(num_blocks, pool.block_size)
        num_matched = len(pool.match(hashes))
        if num_matched == num_blocks:
            return False
        if hashes[num_matched] in self._coming:
            return True
        num_below = self._mover.num_leading(hashes[num_matched:])
        if not num_below or sequence.num_promotions >= _MOST_PROMOTIONS:
            return False
        end = num_matched + num_below  # behind what the host tier has, the pool may have more
        end += len(pool.match(hashes[end:]))
        return self._begin(sequence, hashes[:end])

    def _begin(self, sequence: Sequence, hashes: Seq[bytes]) -> bool:
        pool = self._pool
        wanted = [block_hash for block_hash in hashes if pool.find(block_hash) is None]
        if not self._mover.is_worth_it(len(wanted), len(wanted) * pool.block_size):
            return False
        held = [block for one in hashes if (block := pool.find(one)) is not None]
        pool.acquire(held)
        filled = pool.allocate(len(wanted))
        if filled is None:
            pool.release(held)
            return False
        rest = iter(filled)
        found = [pool.find(block_hash) for block_hash in hashes]
        blocks = [next(rest) if block is None else block for block in found]
        promotion = self._mover.promote(wanted, filled)
        sequence.num_promotions += 1
        self._arrivals[promotion] = _Arrival(sequence=sequence, blocks=blocks)
        self._coming.update(wanted)
        return True

    @property
    def has_ended(self) -> bool:
        """Whether ``collect`` would find something."""
        return self._mover.has_ended

    def collect(self) -> bool:
        """Register what has arrived; whether anything has ended."""
        ended = self._mover.ended()
        for promotion in ended:
            arrival = self._arrivals.pop(promotion)
            right = promotion.names[: promotion.num_right]
            for name, block in zip(right, promotion.blocks, strict=False):
                self._pool.register(block, name.block_hash, name.parent)
                arrival.sequence.promoted.add(name.block_hash)
            self._coming.difference_update(promotion.hashes)
            self._pool.release(arrival.blocks)
        return bool(ended)

    def blocks(self) -> Iterator[int]:
        """Every reference to a slot that is held here."""
        for arrival in self._arrivals.values():
            yield from arrival.blocks
