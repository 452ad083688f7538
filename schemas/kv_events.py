"""What a worker's tiers hold, as the bus tells it: prefix hashes, never token ids.

    KvEvents         from a worker id, some tens of ms after something changed
    KvSnapshotAsk    to a worker id, from whoever has missed some, or came late
    KvSnapshotPart   its answer

Batches of a worker id are numbered from 1 on without a gap, and its heartbeat says the last number
(``Beat.kv_seq``), so that one that was lost is noticed, the last one too. Who has everything up to
``seq`` knows the worker's tiers as they were then; stored and removed say how things are, not what
was done, so to take one twice does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from schemas.codec import Message
from schemas.errors import SchemaError

HASH_BYTES = 16

KvTier = Literal["device", "host", "disk"]


class StoredRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that can be found in ``tier``, one after the other: the parent of each is the one
    before it, and ``parent`` that of the first. A reader need not have heard of that one."""

    tier: KvTier
    parent: bytes
    hashes: bytes  # packed, HASH_BYTES each
    also: tuple[KvTier, ...] = ()  # other tiers that have them, too


class RemovedBlocks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Blocks that can't be found in ``tier`` any more, in no order."""

    tier: KvTier
    hashes: bytes  # packed, HASH_BYTES each
    also: tuple[KvTier, ...] = ()  # other tiers that have lost them, too


class KvEvents(Message, frozen=True, kw_only=True, tag="kv-events/1"):
    """What has changed since the batch before. No block is stored and removed in one tier."""

    worker: str
    seq: int
    stored: tuple[StoredRun, ...] = ()
    removed: tuple[RemovedBlocks, ...] = ()
    is_gap: bool = False  # more has changed than was kept: only a snapshot tells what


class KvSnapshotAsk(Message, frozen=True, kw_only=True, tag="kv-snapshot-ask/1"):
    """What do your tiers hold? Asked part by part, from 0 on."""

    worker: str
    part: int = 0
    at_least_seq: int = 0  # of no use is what is older


class KvSnapshotPart(Message, frozen=True, kw_only=True, tag="kv-snapshot-part/1"):
    """One part of what the tiers held when batch ``seq`` had been said. A part of another ``seq``
    belongs to another snapshot. No parts at all: there is none now, ask again later."""

    worker: str
    seq: int
    part: int = 0
    num_parts: int = 0
    stored: tuple[StoredRun, ...] = ()


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Hashes one behind the other."""
    return b"".join(hashes)


def unpack_hashes(data: bytes) -> list[bytes]:
    """The inverse of :func:`pack_hashes`.

    Raises:
        SchemaError: not a whole number of hashes.
    """
    if len(data) == HASH_BYTES:
        return [data]  # a block that decoding has filled: most runs
    if len(data) % HASH_BYTES:
        raise SchemaError(f"packed hashes must be a multiple of {HASH_BYTES} bytes", param="hashes")
    return [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
