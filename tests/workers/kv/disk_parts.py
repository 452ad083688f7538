"""A disk tier to test with: its blocks, a disk that fails as it is told, a log that is read."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from infra.transport.shm import SharedPool
from workers.kv.api import BlockName, Tier
from workers.kv.disk_tier import DirectoryTier
from workers.kv.eviction import LrfuPolicy
from workers.kv.store import BlockStore
from workers.kv.tally import TierTally

SIZE = 4096
FINGERPRINT = "0123456789abcdef"
FILE_BYTES = 2 * 4096


def block(number: int, parent: int = 0) -> BlockName:
    return BlockName(block_hash=number.to_bytes(16), parent=parent.to_bytes(16))


def chain(first: int, count: int) -> list[BlockName]:
    """Blocks ``first`` to ``first + count - 1``, each the parent of the next."""
    return [block(n, n - 1 if n > first else 0) for n in range(first, first + count)]


def content(one: BlockName) -> bytes:
    """What a block of this name always holds."""
    return xxhash.xxh3_128_digest(one.block_hash) * (SIZE // 16)


def checksum(one: BlockName) -> int:
    found: int = xxhash.xxh3_64_intdigest(content(one))
    return found


class Died(BaseException):
    """The process ends here, whatever it was doing."""


class FickleStore(BlockStore):
    """A store on a disk that can be full, broken, hung, or the death of the process.

    ``fails``: an errno for every write, or 0. ``reads_fail`` the same for reads. ``dies``: "" or
    the next step before which the process ends: "open", "write", "rename".
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, FINGERPRINT, SIZE)
        self.fails = 0
        self.reads_fail = 0
        self.deletes_fail = 0
        self.dies = ""
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, block: BlockName, data: memoryview, checksum: int) -> None:
        self.may_go_on.wait(60)
        part = self.directory / f"{block.block_hash.hex()}.part"
        if self.dies == "open":
            raise Died
        if self.fails or self.dies == "write":
            part.write_bytes(bytes(data)[:100])
            if self.dies:
                raise Died
            raise OSError(self.fails, os.strerror(self.fails))
        if self.dies == "rename":
            super().write(block, data, checksum)
            found = self.directory / f"{block.block_hash.hex()}-{block.parent.hex()}.kv"
            found.rename(part)
            raise Died
        super().write(block, data, checksum)

    def read(self, block: BlockName, into: memoryview) -> int | None:
        self.may_go_on.wait(60)
        if self.reads_fail:
            raise OSError(self.reads_fail, os.strerror(self.reads_fail))
        return super().read(block, into)

    def delete(self, block: BlockName) -> None:
        if self.deletes_fail:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        super().delete(block)


class Heard:
    """What the tier says it has."""

    def __init__(self) -> None:
        self.disk: dict[bytes, bytes] = {}
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def stored(self, tier: Tier, *blocks: BlockName) -> None:
        assert tier == "disk"
        for block in blocks:
            assert block.block_hash not in self.disk
            self.disk[block.block_hash] = block.parent

    def removed(self, tier: Tier, *hashes: bytes) -> None:
        assert tier == "disk"
        for block_hash in hashes:
            del self.disk[block_hash]

    def info(self, event: str, **facts: Any) -> None:
        self.lines.append((event, facts))

    warning = error = info

    def said(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.lines if name == event]


class Disk:
    """A tier with all that is around it; ``clock`` moves by hand."""

    def __init__(self, root: Path, quota_blocks: int = 100) -> None:
        self.root = root
        self.store = FickleStore(root / FINGERPRINT)
        self.heard = Heard()
        self.tally = TierTally()
        self.clock = 100.0
        self.tier = DirectoryTier(
            root,
            self.store,
            quota_blocks * FILE_BYTES + 1000,
            policy=LrfuPolicy(),
            events=self.heard,
            tally=self.tally,
            log=self.heard,  # type: ignore[arg-type]
            now=lambda: self.clock,
        )

    def save(self, one: BlockName) -> bool:
        return self.tier.save(one, memoryview(content(one)), checksum(one))

    def load(self, *blocks: BlockName) -> int:
        """How many of the first are right."""
        with SharedPool(max(1, len(blocks)), SIZE) as pool:
            found = self.tier.load(blocks, pool, range(len(blocks)))
            for slot, (one, got) in enumerate(zip(blocks, found, strict=False)):
                assert got == checksum(one)
                assert bytes(np.asarray(pool.slots[slot])) == content(one)
            return len(found)

    def path(self, one: BlockName) -> Path:
        name = f"{one.block_hash.hex()}-{one.parent.hex()}.kv"
        return self.root / FINGERPRINT / name

    def count(self, outcome: Any) -> int:
        return self.tally.count("disk", outcome)

    def bytes_there(self) -> int:
        """What the files take, by the size of each in pages."""
        return sum(
            -(-path.stat().st_size // 4096) * 4096
            for path in (self.root / FINGERPRINT).glob("*.[kp]*")
        )
