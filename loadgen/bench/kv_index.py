"""Section ``index`` of ``mesh bench kv``: what the radix index costs, in time and memory.

Each size is measured in a process of its own, so that its memory is that of one index::

    python -m loadgen.bench.kv_index 1000000    # figures as JSON

Prompts of 128 blocks share nothing or the first quarter; each lies on one or two of 16 workers,
partly in the host tier. Those looked up are drawn at random, and hashed anew: nothing of them is in
the processor's caches but by chance.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import psutil

from loadgen.bench.kv import KvPlan, KvSection
from pipeline.prefix_hash import block_hash, salt_of
from pipeline.radix_index import RadixIndex

SIZES = (10_000, 100_000, 1_000_000)
PROMPT_BLOCKS = 128
_SHARED_BLOCKS = 32
_NUM_WORKERS = 16
_NUM_LOOKUPS = 2_000
_CHILD_S = 300.0


class IndexFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one size gave."""

    lookup_us: float  # median
    lookup_p99_us: float
    miss_us: float  # median, of prompts that nobody knows
    stored_us: float  # per block
    bytes_per_block: float


def measure(plan: KvPlan) -> KvSection:
    """``index_lookup_us`` and ``index_bytes_per_block`` at the largest size, and the figures of
    each size under ``index_<blocks>``. Takes half a minute."""
    found = {size: _in_a_process(size) for size in SIZES}
    largest = found[SIZES[-1]]
    return KvSection(
        figures={
            "index_lookup_us": largest.lookup_us,
            "index_bytes_per_block": largest.bytes_per_block,
            **{f"index_{size}": msgspec.structs.asdict(one) for size, one in found.items()},
        },
        notes=(f"index: prompts of {PROMPT_BLOCKS} blocks, {_NUM_WORKERS} workers",),
    )


def _in_a_process(num_blocks: int) -> IndexFigures:
    ended = subprocess.run(
        [sys.executable, "-m", "loadgen.bench.kv_index", str(num_blocks)],
        stdout=subprocess.PIPE,
        timeout=_CHILD_S,
        check=True,
    )
    return msgspec.json.decode(ended.stdout, type=IndexFigures)


def figures_of(num_blocks: int) -> IndexFigures:
    """Fill an index with ``num_blocks`` blocks, look prompts up in it."""
    rng = random.Random(num_blocks)
    memory = psutil.Process().memory_info
    before_bytes = memory().rss
    index = RadixIndex(2 * num_blocks)
    started_s = time.process_time()
    seeds = _fill(index, num_blocks)
    filled_s = time.process_time() - started_s
    num_bytes = memory().rss - before_bytes
    hits_us = [_lookup_us(index, rng.choice(seeds)) for _ in range(_NUM_LOOKUPS)]
    misses_us = [_lookup_us(index, -1 - number) for number in range(_NUM_LOOKUPS)]
    return IndexFigures(
        lookup_us=statistics.median(hits_us),
        lookup_p99_us=statistics.quantiles(hits_us, n=100)[98],
        miss_us=statistics.median(misses_us),
        stored_us=filled_s / index.num_blocks * 1e6,
        bytes_per_block=num_bytes / index.num_blocks,
    )


def _fill(index: RadixIndex, num_blocks: int) -> range:
    """Prompts until the index holds ``num_blocks``; their seeds. The time of it includes hashing,
    1 µs per block."""
    seed = 0
    while index.num_blocks < num_blocks:
        hashes = list(_prompt(seed))
        worker = seed % _NUM_WORKERS
        index.stored(f"worker-{worker}", "device", hashes)
        if seed % 3 == 0:
            index.stored(f"worker-{worker}", "host", hashes[:96])
        if seed % 2 == 0:
            index.stored(f"worker-{(worker + 5) % _NUM_WORKERS}", "host", hashes)
        seed += 1
    return range(seed)


def _prompt(seed: int) -> Iterator[bytes]:
    """The hashes of a prompt; every fourth begins like 63 others."""
    parent = salt_of("bench")
    for number in range(PROMPT_BLOCKS):
        shared = seed % 4 == 0 and number < _SHARED_BLOCKS
        parent = block_hash(parent, (number, (seed // 256 if shared else seed) & 0xFFFFFFFF))
        yield parent


def _lookup_us(index: RadixIndex, seed: int) -> float:
    hashes = list(_prompt(seed))
    started_ns = time.perf_counter_ns()
    found = index.lookup(hashes)
    ended_ns = time.perf_counter_ns()
    assert (seed < 0) != bool(found), "a prompt that was stored is not found"
    return (ended_ns - started_ns) / 1000


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(figures_of(int(sys.argv[1]))))
