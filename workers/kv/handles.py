"""Making the handle of a lease."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from infra.bus import Bus
from infra.transport.shm import SharedPool
from schemas.codec import pack_ids
from schemas.kv import KvHandle
from workers.kv.leases import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What a handle says of the pool behind it."""

    memory: SharedPool
    fingerprint: str
    addresses: tuple[str, ...]

    def handle(
        self,
        bus: Bus,
        owner: str,
        lease: Lease,
        slots: Sequence[int],
        num_tokens: int,
        checksums: bytes,
    ) -> KvHandle:
        """The right to read ``slots``, as they are now, while ``lease`` stands."""
        blocks = list(slots)
        return KvHandle(
            lease_id=lease.lease_id,
            secret=lease.secret,
            owner=owner,
            fingerprint=self.fingerprint,
            num_tokens=num_tokens,
            blocks=pack_ids(blocks),
            generations=pack_ids(self.memory.generations[blocks].tolist()),
            checksums=checksums,
            addresses=self.addresses,
            expires_unix_ms=bus.now_unix_ms() + int(bus.times.lease_s * 1000),
        )


def pack_checksums(checksums: Sequence[int]) -> bytes:
    """Packed little-endian uint64, as in handles."""
    return struct.pack(f"<{len(checksums)}Q", *checksums)


def unpack_checksums(data: bytes) -> list[int]:
    """The inverse of :func:`pack_checksums`; ``data`` is a multiple of 8 bytes."""
    return list(struct.unpack(f"<{len(data) // 8}Q", data))
