"""Keys as text: random, hashed, read from a setting that never shows them."""

from __future__ import annotations

import hashlib

import pytest

from infra.api_key import HashedKey, hash_of, hashed_keys, new_key, sha256_hex

KEY = "sk-0123456789abcdefghijklmn"


def test_a_new_key_is_256_random_bits() -> None:
    """No two alike; 43 characters of base64 behind the prefix, fit for a header and a shell."""
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(len(one) == len("mesh-") + 43 and one.isascii() for one in made)


def test_hashes() -> None:
    """SHA-256, and its text back."""
    assert hash_of(KEY.encode()) == hashlib.sha256(KEY.encode()).digest()
    assert sha256_hex(hash_of(b"x").hex().upper()) == hash_of(b"x")
    for bad in ("", "ab", 7, "g" * 64, "a" * 65):
        with pytest.raises(ValueError, match="64 hexadecimal"):
            sha256_hex(bad)


def test_a_setting_keeps_hashes_only() -> None:
    """Keys in clear and hashed ones, with tenant or without, come to the same."""
    digest = hash_of(KEY.encode())
    assert hashed_keys(f"acme={KEY}") == (HashedKey("acme", digest),)
    assert hashed_keys(f"acme=sha256:{digest.hex()}") == hashed_keys(f"acme={KEY}")
    assert hashed_keys([KEY])[0].tenant == f"key-{digest.hex()[:8]}"
    found = hashed_keys(f"{KEY}, b={KEY}2")
    assert hashed_keys(",".join(map(str, found))) == found
    assert KEY not in repr(found)


def test_a_key_may_end_as_base64_does() -> None:
    """``=`` at its end is no tenant."""
    assert hashed_keys(KEY + "==")[0].digest == hash_of(f"{KEY}==".encode())
    assert hashed_keys(f"a={KEY}==")[0] == HashedKey("a", hash_of(f"{KEY}==".encode()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("short-secret", "key 1: not 24 or more"),
        (f"{KEY},{'ü' * 30}", "key 2: not 24"),
        (f"a b={KEY}", "key 1: 'a b' is not"),
        ("sha256:12", "key 1: not the 64"),
        (f"{KEY},{KEY}", "twice"),
        ("", "key 1"),
        (7, "no list"),
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(given: object, words: str) -> None:
    """The position is named; a mistyped secret does not end in a log."""
    with pytest.raises(ValueError, match=words) as caught:
        hashed_keys(given)
    assert "secret" not in str(caught.value)
    assert KEY not in str(caught.value)
