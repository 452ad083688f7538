"""What a handle asks a reader to copy, and the checks that make a copy a read.

Whatever brought the bytes: they count only when, after the copy, every slot of the owner still
has the generation of the handle and every block the checksum.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from infra.transport.shm import SharedPool
from schemas.codec import unpack_ids
from schemas.errors import KvLost, SchemaError
from schemas.kv import KvHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The blocks of a handle and where they go: ``blocks[i]`` of the owner into ``slots[i]`` of
    ours."""

    lease_id: str
    blocks: Sequence[int]
    generations: Sequence[int]
    checksums: Sequence[int]
    slots: Sequence[int]

    @classmethod
    def of(cls, handle: KvHandle, into: SharedPool, slots: Sequence[int]) -> Wanted:
        """Read ``handle``.

        Raises:
            KvLost: it names nothing that could be copied into ``slots``.
        """
        lease = handle.lease_id
        try:
            blocks, generations = unpack_ids(handle.blocks), unpack_ids(handle.generations)
        except SchemaError as error:
            raise KvLost(f"handle {lease}: {error.message}") from error
        if not 0 < len(blocks) == len(slots) == len(generations):
            raise KvLost(f"handle {lease} names {len(blocks)} blocks for {len(slots)} slots")
        if len(handle.checksums) != 8 * len(blocks):
            raise KvLost(f"handle {lease} has not one checksum per block")
        if not 0 <= min(slots) <= max(slots) < into.num_blocks:
            raise KvLost(f"handle {lease} is to go beyond the pool")
        return cls(
            lease_id=lease,
            blocks=blocks,
            generations=generations,
            checksums=_unpack_checksums(handle.checksums),
            slots=slots,
        )

    def check_generations(self, first: int, seen: Sequence[int]) -> None:
        """Compare those of ``blocks[first:]``, read after their bytes were.

        Raises:
            KvLost: one was recycled.
        """
        if list(seen) != list(self.generations[first : first + len(seen)]):
            raise KvLost(f"blocks of lease {self.lease_id} were recycled")

    def check_bytes(self, index: int, into: SharedPool) -> None:
        """Compare the checksum of what lies in ``slots[index]`` now.

        Raises:
            KvLost: it is another one.
        """
        if xxhash.xxh3_64_intdigest(into.slots[self.slots[index]]) != self.checksums[index]:
            raise KvLost(f"blocks of lease {self.lease_id} have another checksum")


def _unpack_checksums(data: bytes) -> Sequence[int]:
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed
