"""Prefix hashes: what makes two blocks the same.

The hash of a full block covers its token ids, everything before it (through the parent's hash)
and a salt: model revision, adapter revision, KV layout, tenant. Blocks that differ in any of
these never share a hash. 128 bits of BLAKE2b.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from schemas.codec import pack_ids

HASH_BYTES = 16


def salt_of(*parts: str) -> bytes:
    """One salt from revision, layout fingerprint, tenant, client salt, ... (order matters)."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block after ``parent`` (the salt for the first block)."""
    return hashlib.blake2b(pack_ids(tuple(token_ids)), key=parent, digest_size=HASH_BYTES).digest()


def prefix_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """One hash per full block of ``token_ids``, chained from ``salt``."""
    hashes: list[bytes] = []
    parent = salt
    for start in range(0, len(token_ids) - len(token_ids) % block_size, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
