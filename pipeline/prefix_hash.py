"""Prefix hashes: what makes two blocks the same.

The hash of a full block covers its token ids, everything before it (through the parent's hash)
and a salt: model revision, adapter revision, KV layout, tenant. Blocks that differ in any of
these never share a hash. 128 bits of BLAKE2b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from schemas.codec import pack_ids
from schemas.kv_events import HASH_BYTES as HASH_BYTES
from schemas.requests import RequestRecord

ID_BYTES = 4  # of a token id, packed


@lru_cache(256)
def salt_of(*parts: str) -> bytes:
    """One salt from revision, layout fingerprint, tenant, client salt, ... (order matters)."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def request_salt(record: RequestRecord, fingerprint: str) -> bytes:
    """The salt of a request's blocks in an engine whose KV layout is ``fingerprint``. Whoever
    computes blocks and whoever looks for them ask here, so that they mean the same."""
    return salt_of(record.revision, fingerprint, record.tenant, record.cache_salt)


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block after ``parent`` (the salt for the first block)."""
    return packed_hash(parent, pack_ids(tuple(token_ids)))


def packed_hash(parent: bytes, block: bytes | memoryview) -> bytes:
    """The same of a block's packed ids."""
    return blake2b(block, key=parent, digest_size=HASH_BYTES).digest()


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """One hash per full block of ``token_ids``, chained from ``salt``."""
    return list(iter_prefix_hashes(pack_ids(tuple(token_ids)), block_size, salt))


def iter_prefix_hashes(packed_ids: bytes, block_size: int, salt: bytes) -> Iterator[bytes]:
    """The same, each computed when it is asked for, of ids as records carry them
    (see :func:`schemas.codec.pack_ids`)."""
    size = block_size * ID_BYTES
    parent = salt
    for start in range(0, len(packed_ids) - size + 1, size):
        block = packed_ids[start : start + size]
        parent = blake2b(block, key=parent, digest_size=HASH_BYTES).digest()
        yield parent
