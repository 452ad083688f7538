from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from pipeline.prefix_hash import HASH_BYTES, block_hash, prefix_hashes, salt_of
from schemas.codec import pack_ids

ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
parts = st.lists(st.text(max_size=6), max_size=4)
sizes = st.integers(1, 8)


@given(ids, sizes, parts)
def test_one_hash_per_full_block(tokens: list[int], size: int, salt: list[str]) -> None:
    """Partial blocks have none; each hash covers all before it."""
    hashes = prefix_hashes(tokens, size, salt_of(*salt))
    assert len(hashes) == len(tokens) // size
    assert len(set(hashes)) == len(hashes)
    assert all(len(one) == HASH_BYTES for one in hashes)


@given(ids, ids, sizes)
def test_equal_exactly_as_far_as_the_prefix_is(one: list[int], other: list[int], size: int) -> None:
    """Two sequences share the hashes of the blocks in their common prefix, and no other."""
    salt = salt_of("r1")
    both = list(zip(prefix_hashes(one, size, salt), prefix_hashes(other, size, salt), strict=False))
    for number, (left, right) in enumerate(both, start=1):
        assert (left == right) == (one[: number * size] == other[: number * size])


@given(ids, sizes)
def test_growing_keeps_the_hashes_there_are(tokens: list[int], size: int) -> None:
    """What a worker hashes block by block is what admission would hash at once."""
    salt = salt_of("r1", "f00d")
    whole = prefix_hashes(tokens, size, salt)
    parent, grown = salt, []
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_hash(parent, tokens[start : start + size])
        grown.append(parent)
    assert grown == whole


@given(parts, parts)
def test_salts_differ_when_anything_differs(one: list[str], other: list[str]) -> None:
    """Revision, layout, tenant, client salt: their order and their borders count."""
    assert (salt_of(*one) == salt_of(*other)) == (one == other)


def test_borders_between_parts_count() -> None:
    """No tenant can name itself into another's blocks."""
    assert salt_of("ab", "c") != salt_of("a", "bc") != salt_of("abc")
    assert salt_of("a") != salt_of("a", "")


@given(ids.filter(len), parts, parts)
def test_tenants_share_nothing(tokens: list[int], one: list[str], other: list[str]) -> None:
    """The same prompt under two salts has no block in common."""
    shared = set(prefix_hashes(tokens, 1, salt_of(*one))) & set(
        prefix_hashes(tokens, 1, salt_of(*other))
    )
    assert bool(shared) == (one == other)


def test_the_hash_is_blake2b_keyed_by_the_parent() -> None:
    """Written down, so that other languages can compute it: 16 bytes over packed ids."""
    salt = salt_of("r1")
    expected = hashlib.blake2b(pack_ids([1, 2, 3]), key=salt, digest_size=16).digest()
    assert block_hash(salt, [1, 2, 3]) == expected
    assert salt == hashlib.blake2b((2).to_bytes(8, "little") + b"r1", digest_size=16).digest()
