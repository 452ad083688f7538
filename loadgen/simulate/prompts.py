"""Prompts without tokens: what two prompts have in common, and the hashes of their blocks.

A trace names the pieces of a prompt by numbers. The name of a piece here is made of its number and
of everything before it, as a prefix hash is; the hashes of its blocks are made of that name::

    trace     46          47          2353                hash_ids
    names     n1 ──────── n2 ──────── n3                  blake2b(name before, number)
    hashes    h h h … h   h h h … h   h h                 shake128(name), 16 bytes per block

They are not the hashes that the tokens of ``loadgen/traces.py`` have, and have all their
properties: equal beginnings have equal hashes, anything else differs. So the index, which only
ever compares hashes, does the same work, and a prompt of 100,000 tokens costs 200 names instead of
its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b, shake_128

from loadgen.traces import HASH_TOKENS, TraceEntry
from schemas.kv_events import HASH_BYTES, unpack_hashes


def piece_tokens(scale: float, block_size: int) -> int:
    """Tokens of one of a trace's pieces when lengths are multiplied by ``scale``: whole blocks."""
    return max(1, round(HASH_TOKENS * scale / block_size)) * block_size


def piece_names(entry: TraceEntry, number: int, num_pieces: int, salt: bytes) -> tuple[bytes, ...]:
    """The names of a prompt's pieces, chained from ``salt``.

    Args:
        number: of the request: pieces that the entry does not name are nobody else's.
    """
    names = []
    parent = salt
    shared = entry.hash_ids[:num_pieces]
    for place in range(num_pieces):
        own = f"h{shared[place]}" if place < len(shared) else f"r{number}.{place}"
        parent = blake2b(own.encode(), key=parent, digest_size=HASH_BYTES).digest()
        names.append(parent)
    return tuple(names)


def piece_hashes(name: bytes, num_blocks: int) -> bytes:
    """The packed hashes of a piece's first ``num_blocks`` blocks."""
    return shake_128(name).digest(HASH_BYTES * num_blocks)


def block_runs(
    names: Sequence[bytes], blocks_per_piece: int, num_blocks: int
) -> Iterator[Sequence[bytes]]:
    """The hashes of a prompt's first ``num_blocks`` blocks, each piece's made when it is asked
    for."""
    for place, name in enumerate(names):
        count = min(blocks_per_piece, num_blocks - place * blocks_per_piece)
        if count > 0:
            yield unpack_hashes(piece_hashes(name, count))
