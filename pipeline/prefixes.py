"""Who holds the beginning of a request's prompt.

Hashes are salted with the KV layout of the engine that computes them. In a fleet of several layouts
a prompt is therefore hashed once per layout, and a match says only of the workers of that layout
what they hold: nobody is told of blocks that it could not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from infra.metrics import Metrics
from pipeline.fleet import Fleet
from pipeline.hash_memo import HashMemo
from pipeline.prefix_hash import request_salt
from pipeline.prefix_walk import Match
from pipeline.radix_index import RadixIndex
from schemas.requests import RequestRecord

# The prefix hashes of a record's prompt in runs, for a block size and a salt.
RunsOf = Callable[[RequestRecord, int, bytes], Iterable[Sequence[bytes]]]


class Prefixes:
    """Looks prompts up in the index.

    Args:
        fleet: says with which layout and block size each worker hashes.
        runs_of: where hashes come from; None: from the prompt's tokens. A simulation, whose prompts
            have none, names another source.
    """

    def __init__(
        self, index: RadixIndex, fleet: Fleet, metrics: Metrics, *, runs_of: RunsOf | None = None
    ) -> None:
        self._index = index
        self._fleet = fleet
        self._hits = metrics.kv_index_lookups.labels("hit")
        self._misses = metrics.kv_index_lookups.labels("miss")
        self._memo = HashMemo()
        self._runs_of = runs_of or self._remembered

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds anything that is known of: then there is nothing to look up."""
        return not self._index.workers

    def find(self, record: RequestRecord) -> dict[str, Match]:
        """By worker, how much of the prompt it holds; only live workers of the request's model
        that hold its first block. Nobody, where the prompt's logprobs are wanted: they come of
        computing it.

        Cost: for each layout about 60 µs per 1,024 tokens that somebody holds, 2 µs if they came
        lately; a prompt that nobody knows is hashed no further than its first block.
        """
        if self.is_empty or record.sampling.prompt_logprobs is not None:
            return {}
        layout_of = self._fleet.layouts(record.served)
        found: dict[str, Match] = {}
        for layout in self._fleet.distinct_layouts(record.served):
            fingerprint, block_size = layout
            if block_size > 0:
                matches = self._lookup(record, fingerprint, block_size)
                found |= {one.worker: one for one in matches if layout_of.get(one.worker) == layout}
        (self._hits if found else self._misses).inc()
        return found

    def _lookup(self, record: RequestRecord, fingerprint: str, block_size: int) -> list[Match]:
        salt = request_salt(record, fingerprint)
        matches = self._index.lookup_runs(self._runs_of(record, block_size, salt))
        if matches and self._index.is_crowded:
            most = max(match.num_blocks for match in matches)
            runs = self._runs_of(record, block_size, salt)
            self._index.touch(list(islice(chain.from_iterable(runs), most)))
        return matches

    def _remembered(
        self, record: RequestRecord, block_size: int, salt: bytes
    ) -> Iterable[Sequence[bytes]]:
        return self._memo.runs(record.prompt_ids, block_size, salt)
