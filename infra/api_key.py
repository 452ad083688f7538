"""API keys as text: made, hashed, and read from a setting.

A key is 256 random bits. What is kept of it, on disk and in memory, is its SHA-256 alone. A slow,
salted hash (argon2, scrypt) protects what people can remember, because that can be guessed; nobody
guesses 256 bits, at any number of hashes per second, and a slow hash would cost every request
milliseconds of the bridge's one thread.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from infra.parse import process_name

PREFIX = "mesh-"
MIN_KEY_CHARS = 24  # of a key that people bring along: 16 random bytes in base64 have 22
_RANDOM_BYTES = 32
_HASHED = "sha256:"
_HEX = re.compile(r"[0-9a-f]{64}\Z")
_SHOWN = 8  # hex digits of a hash that tell keys apart for people


def new_key() -> str:
    """A new key."""
    return PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def hash_of(key: bytes) -> bytes:
    """What is stored of ``key``: 32 bytes."""
    return hashlib.sha256(key).digest()


def sha256_hex(raw: object) -> bytes:
    """A hash as a file has it: 64 hexadecimal digits in, 32 bytes out, else ValueError."""
    if not isinstance(raw, str) or not _HEX.match(raw.lower()):
        raise ValueError("not the 64 hexadecimal digits of a SHA-256")
    return bytes.fromhex(raw)


def shown(digest: bytes) -> str:
    """The beginning of a hash: enough to tell keys apart, nothing to use."""
    return digest.hex()[:_SHOWN]


@dataclass(frozen=True, slots=True)
class HashedKey:
    """A key that stands in the configuration, as its hash, and whose it is."""

    tenant: str
    digest: bytes

    def __str__(self) -> str:
        return f"{self.tenant}={_HASHED}{self.digest.hex()}"


def hashed_keys(raw: object) -> tuple[HashedKey, ...]:
    """Keys with commas between, each ``KEY`` or ``TENANT=KEY``, in clear or as ``sha256:<hex>``.

    A key without tenant is a tenant of its own. No error shows a key.
    """
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise ValueError("no list of keys")
    found = tuple(_hashed(str(item).strip(), i + 1) for i, item in enumerate(items))
    if len({one.digest for one in found}) < len(found):
        raise ValueError("a key is there twice")
    return found


def _hashed(text: str, position: int) -> HashedKey:
    before, _, behind = text.partition("=")
    has_tenant = len(behind.strip("=")) >= MIN_KEY_CHARS  # base64 may end in "="
    tenant, key = (before, behind) if has_tenant else ("", text)
    try:
        if key.startswith(_HASHED):
            digest = sha256_hex(key.removeprefix(_HASHED))
        elif len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"not {MIN_KEY_CHARS} or more printable characters")
        else:
            digest = hash_of(key.encode())
        return HashedKey(process_name(tenant) if tenant else f"key-{shown(digest)}", digest)
    except ValueError as error:
        raise ValueError(f"key {position}: {error}") from None
