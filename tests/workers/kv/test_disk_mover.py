"""What the host tier commits is saved behind its back, and what a request needs is loaded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from infra.transport.shm import SharedPool
from tests.workers.kv.disk_parts import SIZE, Disk, block, chain, checksum, content
from workers.kv.api import BlockName
from workers.kv.disk_mover import DiskMover, ReadSpeed
from workers.kv.host_tier import HostPool

Until = Callable[..., Awaitable[None]]
NUM_SLOTS = 12


class Place:
    """A host tier of twelve slots above a disk."""

    def __init__(self, root: Path) -> None:
        self.disk = Disk(root)
        self.memory = SharedPool(NUM_SLOTS, SIZE)
        self.host = HostPool(self.memory, 0)
        self.mover = DiskMover(self.host, self.disk.tier, self.disk.tally, self.disk.heard)  # type: ignore[arg-type]
        self.host.on_stored = self.mover.enqueue
        self.host.is_below = self.disk.tier.has

    def compute(self, *blocks: BlockName) -> None:
        filling = self.host.reserve(blocks)
        for one, slot in zip(filling.blocks, filling.slots, strict=True):
            self.memory.slots[slot] = list(content(one))
        self.host.commit(filling, [checksum(one) for one in filling.blocks])

    def forget(self) -> None:
        for block_hash in list(self.disk.heard.disk):
            self.host.discard(block_hash)

    def has(self, *blocks: BlockName) -> bool:
        """Whether the host tier has them, with the right bytes."""
        pin = self.host.pin([one.block_hash for one in blocks])
        right = [bytes(self.memory.slots[slot]) for slot in pin.slots]
        self.host.unpin(pin)
        return right == [content(one) for one in blocks]

    def close(self) -> None:
        self.disk.store.may_go_on.set()
        self.mover.close()
        self.host.check_invariants()
        self.disk.tier.check_invariants()
        assert self.host.counts().filling == self.host.counts().pinned == 0
        self.memory.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "w")
    made.mover.start()
    yield made
    made.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kv-disk")]


async def test_blocks_go_down_and_come_back(place: Place, until: Until) -> None:
    """What was committed is saved; once the host tier has lost it, it can be loaded."""
    blocks = chain(1, 10)
    place.compute(*blocks)
    await until(lambda: place.disk.tier.num_blocks == 10)
    place.forget()
    assert await place.mover.load(blocks, 30.0) == 10
    assert place.has(*blocks)
    assert await place.mover.load(blocks, 30.0) == 0


async def test_only_what_is_missing_is_loaded(place: Place, until: Until) -> None:
    """The host tier has some of them, the disk no more than the first ones."""
    blocks = chain(1, 8)
    place.compute(*blocks[:6])
    await until(lambda: place.disk.tier.num_blocks == 6)
    place.forget()
    place.compute(*blocks[:2])
    place.compute(blocks[3])
    assert await place.mover.load(blocks, 30.0) == 3
    assert place.has(*blocks[:6])


async def test_a_wrong_block_ends_a_load(place: Place, until: Until) -> None:
    """Those before it are brought; nothing of the rest is found, no slot is lost."""
    blocks = chain(1, 6)
    place.compute(*blocks)
    await until(lambda: place.disk.tier.num_blocks == 6)
    place.forget()
    path = place.disk.path(blocks[4])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert await place.mover.load(blocks, 30.0) == 4
    assert place.has(*blocks[:4])
    assert place.host.num_leading([blocks[4].block_hash]) == 0
    assert place.disk.count("corrupt") == 1


async def test_a_disk_that_hangs_keeps_nobody_waiting(place: Place, until: Until) -> None:
    """A load ends with its time-out, or with its request; the slots that are being filled are
    nobody else's until the disk goes on."""
    blocks = chain(1, 3)
    place.compute(*blocks)
    await until(lambda: place.disk.tier.num_blocks == 3)
    place.forget()
    place.disk.store.may_go_on.clear()
    assert await place.mover.load(blocks, 0.05) == 0
    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(place.mover.load(blocks, 60.0))
        await until(lambda: place.host.counts().filling == 3)
        loading.cancel()  # its request is gone
    place.disk.store.may_go_on.set()
    await until(lambda: place.host.counts().filling == 0)
    assert place.has(*blocks)


async def test_lines_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room in line is not loaded, and at once."""
    monkeypatch.setattr("workers.kv.disk_mover._MAX_LOADS", 0)
    assert await place.mover.load(chain(1, 2), 30.0) == 0


async def test_what_was_evicted_before_its_turn_is_dropped(tmp_path: Path, until: Until) -> None:
    """It is counted; what is still there is saved."""
    place = Place(tmp_path / "w")
    place.compute(*chain(1, 4))
    place.host.discard(block(4).block_hash)
    place.mover.start()
    await until(lambda: place.disk.tier.num_blocks == 3)
    await until(lambda: place.disk.count("dropped") == 1)
    place.close()


async def test_the_end_saves_what_waits(tmp_path: Path) -> None:
    """A worker that drains has its last blocks on disk."""
    place = Place(tmp_path / "w")
    assert place.disk.tier.open()
    place.mover.start()
    place.compute(*chain(1, 9))
    place.close()
    later = Disk(tmp_path / "w")
    assert later.tier.open()
    assert later.load(*chain(1, 9)) == 9
    assert await place.mover.load(chain(1, 2), 30.0) == 0


def test_measured_speed_is_believed_for_a_while() -> None:
    """It follows what is measured, and a slow disk is tried again after a minute."""
    speed = ReadSpeed()
    assumed = speed.bytes_s(1000.0)
    speed.measured(1_000_000, 1.0, 1000.0)
    assert speed.bytes_s(1001.0) == 1_000_000
    speed.measured(3_000_000, 1.0, 1002.0)
    assert 1_000_000 < speed.bytes_s(1003.0) < 3_000_000
    assert speed.bytes_s(1063.0) == assumed
