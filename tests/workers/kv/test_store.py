"""One file per block: what is read is what was written, or it is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from workers.kv.api import BlockName
from workers.kv.store import HEADER_BYTES, BlockStore, delete_blocks

SIZE = 5000
BLOCK = BlockName(block_hash=b"h" * 16, parent=b"p" * 16)
DATA = bytes(range(250)) * (SIZE // 250)
CHECKSUM = xxhash.xxh3_64_intdigest(DATA)


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    made = BlockStore(tmp_path / "0123456789abcdef", "0123456789abcdef", SIZE)
    assert made.scan() == ([], 0)
    return made


def write(store: BlockStore, block: BlockName = BLOCK) -> Path:
    store.write(block, memoryview(DATA), CHECKSUM)
    return store.directory / f"{block.block_hash.hex()}-{block.parent.hex()}.kv"


def test_a_block_comes_back(store: BlockStore) -> None:
    """The bytes, their checksum, and the name, also for a later worker; files have one size."""
    path = write(store)
    into = bytearray(SIZE)
    assert store.read(BLOCK, memoryview(into)) == CHECKSUM
    assert into == DATA
    found, num_torn = store.scan()
    assert ([stored.block for stored in found], num_torn) == ([BLOCK], 0)
    assert path.stat().st_size <= store.file_bytes


def test_the_last_used_comes_last(store: BlockStore) -> None:
    """A scan gives the blocks in the order in which they were read or written."""
    others = [BlockName(block_hash=bytes([n]) * 16, parent=b"p" * 16) for n in range(3)]
    for age, one in enumerate(reversed(others)):
        os.utime(write(store, one), (100 - age, 100 - age))
    store.read(others[0], memoryview(bytearray(SIZE)))
    found, _ = store.scan()
    assert [stored.block for stored in found] == [others[1], others[2], others[0]]


@pytest.mark.parametrize(
    "place", [0, 7, 8, 23, 24, 40, 56, 64, 71, HEADER_BYTES, HEADER_BYTES + SIZE - 1]
)
def test_a_flipped_bit_is_noticed(store: BlockStore, place: int) -> None:
    """Anywhere in the block, or in the part of the header that says something."""
    path = write(store)
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
    assert store.read(BLOCK, memoryview(bytearray(SIZE))) is None


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + SIZE - 1])
def test_a_torn_file_is_noticed(store: BlockStore, size: int) -> None:
    """When it is read; and deleted when the directory is."""
    path = write(store)
    path.write_bytes(path.read_bytes()[:size])
    assert store.read(BLOCK, memoryview(bytearray(SIZE))) is None
    assert store.scan() == ([], 1)
    assert not path.exists()


def test_a_file_that_is_too_long_is_noticed(store: BlockStore) -> None:
    """It is not one of ours."""
    path = write(store)
    path.write_bytes(path.read_bytes() + b"x")
    assert store.read(BLOCK, memoryview(bytearray(SIZE))) is None


def test_a_file_of_another_block_or_layout_is_noticed(store: BlockStore, tmp_path: Path) -> None:
    """Whatever name it was given."""
    other = BlockName(block_hash=b"o" * 16, parent=b"p" * 16)
    write(store).rename(store.directory / f"{other.block_hash.hex()}-{other.parent.hex()}.kv")
    assert store.read(other, memoryview(bytearray(SIZE))) is None
    foreign = BlockStore(store.directory, "f" * 16, SIZE)
    write(store)
    assert foreign.read(BLOCK, memoryview(bytearray(SIZE))) is None


def test_a_write_that_was_cut_off_leaves_nothing(store: BlockStore) -> None:
    """A worker that died before the rename leaves a part, which the next one deletes."""
    part = store.directory / f"{BLOCK.block_hash.hex()}.part"
    part.write_bytes(b"half")
    with pytest.raises(FileNotFoundError):
        store.read(BLOCK, memoryview(bytearray(SIZE)))
    assert store.scan() == ([], 0)
    assert not part.exists()


def test_strangers_stay(store: BlockStore) -> None:
    """Only files named like ours are ever deleted."""
    notes = store.directory / "notes.txt"
    notes.write_text("mine")
    write(store)
    assert len(store.scan()[0]) == 1
    assert delete_blocks(store.directory) == 1
    assert notes.read_text() == "mine"


def test_only_blocks_are_kept(store: BlockStore) -> None:
    """Neither a piece of one, nor one whose name is none."""
    with pytest.raises(ValueError, match="are no block of"):
        store.write(BLOCK, memoryview(DATA[:-1]), CHECKSUM)
    short = BlockName(block_hash=b"h", parent=b"p" * 16)
    with pytest.raises(ValueError, match="is no name of a block"):
        store.write(short, memoryview(DATA), CHECKSUM)
    assert store.scan() == ([], 0)
