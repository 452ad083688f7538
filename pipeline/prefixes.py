"""Who holds the beginning of a request's prompt.

Hashes are salted with the KV layout of the engine that computes them. In a fleet of several layouts
a prompt is therefore hashed once per layout, and a match says only of the workers of that layout
what they hold: nobody is told of blocks that it could not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from infra.metrics import Metrics
from pipeline.fleet import Fleet, Layout
from pipeline.hash_memo import HashMemo
from pipeline.prefix_hash import request_salt
from pipeline.prefix_walk import NOBODY, Found, Roll
from pipeline.radix_index import RadixIndex
from schemas.requests import RequestRecord

_MAX_MODELS = 256  # those that are gone may be among them

# The prefix hashes of a record's prompt in runs, for a block size and a salt.
RunsOf = Callable[[RequestRecord, int, bytes], Iterable[Sequence[bytes]]]


class _Readers(NamedTuple):
    """Whom to ask about, of one model."""

    roll: Roll  # of the index, when this was made
    workers: Mapping[str, Layout]  # of the fleet, then
    layouts: tuple[tuple[str, int, int], ...]  # fingerprint, block size, who has it as bits


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
        self._readers: dict[str, _Readers] = {}  # by model, until somebody comes or goes

    @property
    def is_empty(self) -> bool:
        """Whether nobody holds anything that is known of: then there is nothing to look up."""
        return self._index.is_empty

    def find(self, record: RequestRecord) -> Found:
        """By worker, how much of the prompt it holds; only live workers of the request's model
        that hold its first block. Nobody, where the prompt's logprobs are wanted: they come of
        computing it.

        Cost: for each layout about 60 µs per 1,024 tokens that somebody holds, 0.6 µs if they came
        lately; a prompt that nobody knows is hashed no further than its first block.
        """
        found = NOBODY
        if self._index.is_empty or record.sampling.prompt_logprobs is not None:
            return found
        for fingerprint, block_size, readers in self._readers_of(record.served).layouts:
            salt = request_salt(record, fingerprint)
            found = found.joined(self._lookup(record, block_size, salt, readers))
        (self._hits if found else self._misses).inc()
        return found

    def _lookup(self, record: RequestRecord, block_size: int, salt: bytes, readers: int) -> Found:
        found = self._index.lookup_runs(self._runs_of(record, block_size, salt), readers)
        if found and self._index.is_crowded:
            runs = self._runs_of(record, block_size, salt)
            self._index.touch(list(islice(chain.from_iterable(runs), found.most)))
        return found

    def _readers_of(self, served: str) -> _Readers:
        roll, workers = self._index.roll, self._fleet.layouts(served)
        known = self._readers.get(served)
        if known is None or known.roll is not roll or known.workers is not workers:
            if len(self._readers) > _MAX_MODELS:
                self._readers.clear()
            layouts = tuple(
                (*layout, roll.bits(worker for worker, its in workers.items() if its == layout))
                for layout in self._fleet.distinct_layouts(served)
                if layout[1] > 0
            )
            known = self._readers[served] = _Readers(roll, workers, layouts)
        return known

    def _remembered(
        self, record: RequestRecord, block_size: int, salt: bytes
    ) -> Iterable[Sequence[bytes]]:
        return self._memo.runs(record.prompt_ids, block_size, salt)
