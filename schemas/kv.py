"""How KV blocks are named, and how they are handed over.

A handle is a lease: while it lasts, its owner keeps the blocks as they are. A reader copies the
bytes first and checks generations and checksums afterwards; only then has it read anything.
"""

from __future__ import annotations

import msgspec

from schemas.codec import Message
from schemas.requests import RequestRecord


class KvHandle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the KV blocks of ``num_tokens`` tokens lie, and the right to read them."""

    lease_id: str
    secret: bytes
    owner: str  # worker id
    fingerprint: str  # see KvLayout.fingerprint: readers with another one refuse
    num_tokens: int
    blocks: bytes  # packed uint32: slots in the owner's pool, in token order
    generations: bytes  # packed uint32: of those slots when the lease was given
    checksums: bytes  # packed uint64 (xxh3 of the block's bytes); zeros: not computed
    addresses: tuple[str, ...]  # "shm://<host>/<abstract socket>", later "ucx://…"
    expires_unix_ms: int


class KvReady(Message, frozen=True, kw_only=True, tag="kv-ready/1"):
    """A prefill is done: its tokens are published, its blocks wait under ``handle``.

    ``epoch`` and ``after_seq`` are those of the claim under which it was done.
    """

    request_id: str
    epoch: int
    after_seq: int
    reader: str
    worker: str
    handle: KvHandle
    tokens: tuple[bytes, ...]  # per choice, packed uint32: all tokens published so far
    finished: tuple[str, ...]  # per choice: finish reason, "" while it runs
    num_cached_tokens: int = 0
    record: RequestRecord | None = None  # None: too large, read it at mesh.v1.request.<id>


class LeaseRelease(Message, frozen=True, kw_only=True, tag="lease-release/1"):
    """To the owner: the reader is done with a lease, or could not use it (``ok`` false)."""

    lease_id: str
    secret: bytes
    ok: bool = True
