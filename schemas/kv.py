"""How KV blocks are named, and how they are handed over.

A handle is a lease: while it lasts, its owner keeps the blocks as they are. A reader copies the
bytes first and checks generations and checksums afterwards; only then has it read anything. The
blocks are those of a request that goes on elsewhere, or a prefix that is lent.
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
    addresses: tuple[str, ...]  # "shm://<host>/<abstract socket>", "ucx://<address>:<port>"
    expires_unix_ms: int


class KvSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another worker that has the first ``num_blocks`` blocks of a prompt, as far as is known."""

    worker: str
    num_blocks: int
    tier: str = "host"  # the lowest in which some of them are: "device", "host" or "disk"


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


class LeaseRenew(Message, frozen=True, kw_only=True, tag="lease-renew/1"):
    """To the owner: the reader is still at it; the lease stands for another period."""

    lease_id: str
    secret: bytes


class KvLend(Message, frozen=True, kw_only=True, tag="kv-lend/1"):
    """To a worker: lend the first of these blocks, as many as you have of a prompt's beginning.

    ``parent`` is the hash of the block before the first one (the salt, before a prompt's first).
    """

    reader: str  # worker id
    fingerprint: str  # of its KV layout; owners with another one have nothing for it
    parent: bytes
    hashes: bytes  # 16 bytes each, in token order
    deadline_unix_ms: int  # an answer after that is of no use


class KvLent(Message, frozen=True, kw_only=True, tag="kv-lent/1"):
    """The answer to :class:`KvLend`: a lease on the first ``num_blocks`` of them, or none."""

    num_blocks: int
    handle: KvHandle | None = None
    reason: str = ""  # without a handle: "absent", "busy", "leaving" or "other_layout"
