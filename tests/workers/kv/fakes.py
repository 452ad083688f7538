"""A host tier, a disk and other workers, small enough to see through; their books are strict."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import xxhash

from infra.transport.shm import SharedPool
from pipeline.prefix_hash import block_hash
from schemas.codec import pack_ids, unpack_ids
from schemas.errors import KvLost
from schemas.kv import KvHandle, KvLent
from workers.kv.api import BlockName, Filling, HostTier, Pin
from workers.kv.handles import pack_checksums, unpack_checksums

BLOCK_BYTES = 64
SALT = b"s" * 16


def chain_of(count: int, first: int = 0) -> list[BlockName]:
    """The blocks of one prompt."""
    parent, blocks = SALT, []
    for number in range(count):
        own = block_hash(parent, [first, number])
        blocks.append(BlockName(block_hash=own, parent=parent))
        parent = own
    return blocks


def bytes_of(block: BlockName) -> bytes:
    """What a block must hold, wherever it lies."""
    return block.block_hash * (BLOCK_BYTES // 16)


def checksum_of(block: BlockName) -> int:
    return xxhash.xxh3_64_intdigest(bytes_of(block))


class FakeTier:
    """A host tier that evicts nothing by itself. Every misuse fails at once."""

    def __init__(self, num_slots: int = 64) -> None:
        self.memory = SharedPool(num_slots, BLOCK_BYTES)
        self.free = list(range(num_slots))
        self.slots: dict[bytes, int] = {}
        self.sums: dict[bytes, int] = {}
        self.filling: dict[bytes, int] = {}
        self.pins: list[Pin] = []
        self.lock = threading.Lock()

    def put(self, blocks: Sequence[BlockName]) -> None:
        """Blocks that were computed here."""
        filling = self.reserve(blocks)
        for block, slot in zip(filling.blocks, filling.slots, strict=True):
            self.memory.slots[slot] = memoryview(bytes_of(block))
        self.commit(filling, [checksum_of(block) for block in filling.blocks])

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        for number, block_hash_ in enumerate(hashes):
            if block_hash_ not in self.slots:
                return number
        return len(hashes)

    def pin(self, hashes: Sequence[bytes]) -> Pin:
        with self.lock:
            found = hashes[: self.num_leading(hashes)]
            pin = Pin(
                blocks=tuple(BlockName(block_hash=one, parent=b"") for one in found),
                slots=tuple(self.slots[one] for one in found),
                checksums=tuple(self.sums[one] for one in found),
            )
            self.pins.append(pin)
            return pin

    def unpin(self, pin: Pin) -> None:
        with self.lock:
            self.pins.remove(next(one for one in self.pins if one is pin))

    def reserve(self, blocks: Sequence[BlockName]) -> Filling:
        with self.lock:
            new = [
                block
                for block in blocks
                if block.block_hash not in self.slots and block.block_hash not in self.filling
            ][: len(self.free)]
            slots = tuple(self.free.pop() for _ in new)
            for block, slot in zip(new, slots, strict=True):
                self.memory.touch(slot)
                self.filling[block.block_hash] = slot
            return Filling(blocks=tuple(new), slots=slots)

    def commit(self, filling: Filling, checksums: Sequence[int]) -> None:
        with self.lock:
            for block, slot, total in zip(filling.blocks, filling.slots, checksums, strict=True):
                assert self.filling.pop(block.block_hash) == slot
                assert bytes(self.memory.slots[slot]) == bytes_of(block), "wrong bytes are shared"
                self.slots[block.block_hash], self.sums[block.block_hash] = slot, total

    def abort(self, filling: Filling) -> None:
        with self.lock:
            for block, slot in zip(filling.blocks, filling.slots, strict=True):
                assert self.filling.pop(block.block_hash) == slot, "given back twice"
                self.free.append(slot)

    def discard(self, block_hash: bytes) -> None:
        raise AssertionError("nothing here is found to be wrong once it was committed")

    def check_idle(self) -> None:
        """Nothing is pinned, nothing half filled, no slot lost."""
        assert not self.pins, "a pin leaked"
        assert not self.filling, "slots wait for bytes that nobody brings"
        assert len(self.free) + len(self.slots) == self.memory.num_blocks


class FakeDisk:
    """Blocks in a set, brought up in no time; ``broken`` ones can't be read right."""

    def __init__(self, tier: FakeTier) -> None:
        self.tier = tier
        self.blocks: set[bytes] = set()
        self.broken: set[bytes] = set()
        self.block_s = 1e-5

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        return next((n for n, one in enumerate(hashes) if one not in self.blocks), len(hashes))

    def read_s(self, num_blocks: int) -> float:
        return num_blocks * self.block_s

    async def load(self, blocks: Sequence[BlockName], timeout_s: float) -> int:
        count = 0
        for block in blocks:
            if block.block_hash in self.broken:
                self.blocks.discard(block.block_hash)
            if block.block_hash not in self.blocks:
                break
            count += 1
        self.tier.put(blocks[:count])
        return count


class FakeEngine:
    """Blocks on the device, and a speed; so slow that all is worth fetching, and waiting for."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()
        self.token_s = 2.0

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        return next((n for n, one in enumerate(hashes) if one not in self.cached), len(hashes))

    def prefill_s(self, start: int, end: int) -> float:
        return self.token_s * (end - start)


class FakeReader:
    """Reads from tiers of this process; ``gate`` holds reads up, as a slow owner does."""

    def __init__(self, owners: Mapping[str, HostTier]) -> None:
        self.owners = owners
        self.gate = threading.Event()
        self.gate.set()
        self.num_reads = 0
        self.is_reading = threading.Event()

    def read(
        self, handle: KvHandle, into: SharedPool, slots: Sequence[int], deadline_s: float
    ) -> None:
        self.num_reads += 1
        self.is_reading.set()
        assert self.gate.wait(60), "a test left the gate shut"
        source = self.owners[handle.owner].memory
        wanted = unpack_checksums(handle.checksums)
        rows = unpack_ids(handle.blocks)
        for block, slot, total in zip(rows, slots, wanted, strict=True):
            into.slots[slot] = source.slots[block]
            if xxhash.xxh3_64_intdigest(into.slots[slot]) != total:
                raise KvLost("another checksum")
        if time.monotonic() > deadline_s:
            raise KvLost("too late")


class FakeLenders:
    """Lends what the owners' tiers have; keeps which leases stand."""

    def __init__(self, owners: Mapping[str, HostTier], fingerprint: str = "test") -> None:
        self.owners = owners
        self.fingerprint = fingerprint
        self.leases: dict[str, Pin] = {}
        self.ended: list[tuple[str, bool]] = []
        self.asked: list[str] = []
        self.dead: set[str] = set()
        self.num_renewed = 0

    async def ask(self, owner: str, blocks: Sequence[BlockName], timeout_s: float) -> KvLent:
        self.asked.append(owner)
        if owner in self.dead:
            raise KvLost("no answer")
        pin = self.owners[owner].pin([block.block_hash for block in blocks])
        if not pin.slots:
            self.owners[owner].unpin(pin)
            return KvLent(num_blocks=0, reason="absent")
        lease_id = f"lease-{len(self.asked)}"
        self.leases[lease_id] = pin
        slots = list(pin.slots)
        handle = KvHandle(
            lease_id=lease_id,
            secret=b"secret",
            owner=owner,
            fingerprint=self.fingerprint,
            num_tokens=4 * len(slots),
            blocks=pack_ids(slots),
            generations=pack_ids(self.owners[owner].memory.generations[slots].tolist()),
            checksums=pack_checksums(pin.checksums),
            addresses=(),
            expires_unix_ms=0,
        )
        return KvLent(num_blocks=len(slots), handle=handle)

    async def renew(self, handle: KvHandle) -> None:
        self.num_renewed += 1

    async def release(self, handle: KvHandle, *, ok: bool) -> None:
        pin = self.leases.pop(handle.lease_id)
        self.owners[handle.owner].unpin(pin)
        self.ended.append((handle.owner, ok))
