"""Faults of a KV disk: what they do to the files, and to nothing else."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadgen.chaos import bad_disk
from loadgen.chaos.bad_disk import BadDisk
from loadgen.chaos.disk_faults import flip_all
from loadgen.chaos.faults import FAULTS
from workers.kv.api import BlockName
from workers.kv.store import BlockStore

BLOCK = BlockName(block_hash=b"h" * 16, parent=b"p" * 16)
DATA = memoryview(bytes(8192))


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    made = BlockStore(tmp_path / "worker" / ("0" * 16), "0" * 16, len(DATA))
    made.scan()
    return made


@pytest.fixture
def full() -> Iterator[BadDisk]:
    disk = BadDisk("full")
    disk.install()
    yield disk
    disk.remove()


def test_the_faults_of_a_disk_are_there() -> None:
    """Full, slow, and wrong."""
    assert FAULTS.keys() >= {"disk-full", "disk-slow", "disk-corrupt"}
    assert FAULTS["disk-full"]().name == "disk-full"


def test_a_disk_is_full_from_one_signal_to_the_next(store: BlockStore, full: BadDisk) -> None:
    """For blocks alone: other files can be written."""
    store.write(BLOCK, DATA, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(OSError, match="No space left") as caught:
        store.write(BLOCK, DATA, 0)
    assert caught.value.errno == errno.ENOSPC
    (store.directory / "log").write_text("a line")
    os.kill(os.getpid(), signal.SIGUSR1)
    store.write(BLOCK, DATA, 0)


def test_a_slow_disk_takes_its_time(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives the right answer."""
    slept: list[float] = []
    monkeypatch.setattr(bad_disk.time, "sleep", slept.append)
    disk = BadDisk("slow")
    disk.install()
    try:
        store.write(BLOCK, DATA, 0)
        assert slept == []
        disk.change()
        store.write(BLOCK, DATA, 0)
        assert store.read(BLOCK, memoryview(bytearray(len(DATA)))) is None  # 0 was no checksum
        assert len(slept) == 2
    finally:
        disk.remove()


@pytest.mark.parametrize("place", [0.0, 0.9999])
def test_a_flipped_bit_makes_a_block_useless(store: BlockStore, place: float) -> None:
    """Where there is a block; it is still as long as before."""
    checksum = 0x123
    store.write(BLOCK, DATA, checksum)
    [path] = store.directory.iterdir()
    before = path.read_bytes()
    assert flip_all(store.directory.parent.parent, place) == 1
    after = path.read_bytes()
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
