"""What a sequence need not compute: blocks of the pool, and of the tier below."""

from __future__ import annotations

from workers.engine.arrivals import Arrivals
from workers.engine.block_pool import BlockPool
from workers.engine.sequence import Sequence
from workers.kv.tally import TierTally


class Reuse:
    """Finds prefixes for the sequences of one scheduler.

    Attributes:
        arrivals: brings blocks from the host tier; None: there is none.
        tally: counts what was found when a request first ran.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.arrivals: Arrivals | None = None
        self.tally = TierTally()
        self._pool = pool

    def is_coming(self, sequence: Sequence) -> bool:
        """Whether more of its prefix will be in the pool soon: worth waiting for."""
        if self.arrivals is None:
            return False
        return self.arrivals.bring(sequence, self._num_sharable(sequence))

    def take(self, sequence: Sequence) -> int | None:
        """Share the blocks whose KV exists, all but the last token's: that one must be computed.
        A prompt's scores come of computing it, so as long as some are missing nothing is shared.

        Returns:
            The slot to copy into the next block when a fork begins within a block, else None.
        """
        size = self._pool.block_size
        group = sequence.group
        if group.scores_to_fill is not None:
            return None
        hashes = sequence.prefix_hashes(self._num_sharable(sequence), size)
        blocks = self._pool.match(hashes)
        num_tokens = len(blocks) * size
        if not group.has_started:
            num_promoted = sum(one in sequence.promoted for one in hashes[: len(blocks)])
            group.num_cached_tokens = min(num_tokens, sequence.num_prompt_tokens)
            group.num_host_tokens = min(num_promoted * size, group.num_cached_tokens)
        source = None
        if (root := group.root) is not None and not sequence.is_root:
            num_forked = min(root.num_computed_tokens, len(sequence.token_ids) - 1)
            if num_forked > num_tokens:
                num_tokens = num_forked
                blocks = root.block_table[: num_forked // size]
                source = root.block_table[num_forked // size] if num_forked % size else None
        self._pool.acquire(blocks)
        sequence.block_table = list(blocks)
        sequence.num_computed_tokens = num_tokens
        return source

    def num_found(self, sequence: Sequence) -> int:
        """Of its tokens, how many need not be computed: their KV is its own, or in the pool."""
        size = self._pool.block_size
        if sequence.block_table:
            return sequence.num_computed_tokens
        hashes = sequence.prefix_hashes(self._num_sharable(sequence), size)
        return len(self._pool.match(hashes)) * size

    def count(self, sequence: Sequence) -> None:
        """Its request runs for the first time: count what was found for it."""
        size, group = self._pool.block_size, sequence.group
        num_found, num_host = group.num_cached_tokens // size, group.num_host_tokens // size
        self.tally.add("device", "hit", num_found - num_host)
        self.tally.add("host", "hit", num_host)
        self.tally.add("device", "miss", self._num_sharable(sequence) - num_found)

    def _num_sharable(self, sequence: Sequence) -> int:
        if sequence.group.scores_to_fill is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self._pool.block_size
