"""The seams of the KV plane inside a worker: where a block is, and how it moves.

    L1 device   the engine's own slots (``BlockPool``); the engine's thread alone keeps its books
    L2 host     ``HostTier``: further slots of the same shared memory, which other workers map
    L3 disk     ``DiskTier``: a directory that survives the worker

A block is full, and known by its prefix hash. What comes into L1 from outside the engine comes out
of L2: what disk or another worker has is brought there first, so every path checks the bytes and
keeps the books in one place.

    computed      L1 -> L2 -> L3    in the background: an eviction then costs nothing
    asked for     L3 -> L2 -> L1    from the moment at which the task is queued
    another's     its L2 -> our L2  under a lease, when that is faster than computing
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from infra.transport.shm import SharedPool

Tier = Literal["device", "host", "disk"]


class BlockName(msgspec.Struct, frozen=True):
    """A full block: its prefix hash, and that of the block before it (the salt, for the first)."""

    block_hash: bytes
    parent: bytes


class BlockEvents(Protocol):
    """Hears what a worker's tiers hold. Called from any thread, also under locks: it only notes."""

    def stored(self, tier: Tier, *blocks: BlockName) -> None:
        """``blocks`` can be found in ``tier`` from now on."""

    def removed(self, tier: Tier, *hashes: bytes) -> None:
        """They can't any more."""


class EvictionPolicy(Protocol):
    """Which blocks of a tier go first. Pure and not thread-safe: the tier calls it with its books.

    A block's children go before it, and pinned ones never; ``workers.kv.eviction`` has policies.
    """

    def added(self, block: BlockName) -> None:
        """The tier has it from now on; counts as a use. Parents may come later, or never."""

    def used(self, block_hash: bytes) -> None:
        """It was of use. Of a block that the tier hasn't, nothing."""

    def removed(self, block_hash: bytes) -> None:
        """The tier hasn't got it any more, evicted or not. Of one it hadn't, nothing."""

    def victims(
        self,
        count: int,
        pinned: Collection[bytes] = frozenset(),
        prefer: Callable[[bytes], bool] | None = None,
    ) -> list[bytes]:
        """Up to ``count`` blocks of least worth, children before parents, no more than the
        configured share of what is not pinned (one at least). None of them is removed by this:
        the tier evicts what it likes of them, and says so with ``removed``.

        Args:
            pinned: blocks of the tier that stay; looked up often, so a set or the like.
            prefer: which blocks to take before others of about the same worth, such as those that
                a lower tier has.
        """

    def check_invariants(self) -> None:
        """Raise AssertionError when the books contradict themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Blocks of the host tier that stay where they are until they are unpinned.

    ``slots`` and ``checksums`` (xxh3-64 of the bytes) are those of the first blocks that were
    asked for, as far as the tier had them.
    """

    blocks: tuple[BlockName, ...]
    slots: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Slots of the host tier that wait for the bytes of ``blocks``, in that order. Nobody else
    finds or writes them until ``commit`` or ``abort``, each of which may be given a part."""

    def part(self, numbers: Sequence[int]) -> Filling:
        """The blocks and slots at these places."""
        return Filling(
            blocks=tuple(self.blocks[number] for number in numbers),
            slots=tuple(self.slots[number] for number in numbers),
        )

    blocks: tuple[BlockName, ...]
    slots: tuple[int, ...]


class HostTier(Protocol):
    """L2: blocks by prefix hash in host memory. Thread-safe; nothing here waits for a disk, a
    network or the engine.

    Attributes:
        memory: the worker's shared memory; the slots are numbers in it, behind those of the engine.
    """

    memory: SharedPool

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes``, without a gap, are here. Counts as no use."""

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block is here, just now."""

    def pin(self, hashes: Sequence[bytes]) -> Pin:
        """Keep the first ``hashes``, as far as they are here without a gap, until ``unpin``.
        Counts as a use of each."""

    def unpin(self, pin: Pin) -> None:
        """End a pin; once per pin."""

    def reserve(self, blocks: Sequence[BlockName]) -> Filling:
        """Slots for those of ``blocks`` that are neither here nor being filled, in order, as many
        as there is room for: what is evicted for them is unpinned and of less worth."""

    def commit(self, filling: Filling, checksums: Sequence[int]) -> None:
        """The bytes are written: the blocks can be found from now on.

        Raises:
            ValueError: not one checksum per slot.
        """

    def abort(self, filling: Filling) -> None:
        """They were not written, or were wrong: the slots are free again."""

    def discard(self, block_hash: bytes) -> None:
        """The bytes of a block were found to be wrong: nobody finds it any more, and its slot is
        free as soon as nobody pins it. Counted; unknown blocks are fine."""


class DiskTier(Protocol):
    """L3: blocks by prefix hash in files. Thread-safe; calls wait for the disk, so never on the
    event loop nor on the engine's thread."""

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes``, without a gap, it has. Does not touch the disk."""

    def load(
        self, blocks: Sequence[BlockName], into: SharedPool, slots: Sequence[int]
    ) -> list[int]:
        """Read blocks into ``slots`` and check them.

        Returns:
            The checksums of the first blocks, without a gap, that were read and are right. What
            is wrong on the disk is deleted and counted.
        """

    def save(self, block: BlockName, data: memoryview, checksum: int) -> bool:
        """Keep a block; whether it is kept now. False when the disk is full, fails, or the quota
        has room for nothing of so little worth; never raises for the disk's sake."""
