"""A pool in shared memory: what one process writes another sees, and nothing stays behind."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.transport.shm import SharedPool


def open_files() -> list[str]:
    """What our descriptors point at, as far as it is memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # of the listing itself
    return sorted(link for link in links if "memfd" in link)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 300), st.data())
def test_a_reader_sees_what_the_owner_writes(
    num_blocks: int, block_bytes: int, data: st.DataObject
) -> None:
    """Slots and generations of any geometry, also across the page where the header ends."""
    slot = data.draw(st.integers(0, num_blocks - 1))
    with SharedPool(num_blocks, block_bytes) as owner:
        reader = SharedPool(num_blocks, block_bytes, fd=os.dup(owner.fd))
        owner.slots[slot] = 7
        owner.touch(slot)
        assert (reader.slots[slot] == 7).all()
        assert reader.generations.tolist() == [int(s == slot) for s in range(num_blocks)]
        assert int(reader.slots.sum()) == 7 * block_bytes
        reader.close()


def test_a_reader_cannot_write() -> None:
    """It maps the memory read-only: the owner's KV is safe from it."""
    with SharedPool(4, 8) as owner, SharedPool(4, 8, fd=os.dup(owner.fd)) as reader:
        with pytest.raises(ValueError, match="read-only"):
            reader.slots[0] = 1
        with pytest.raises(TypeError, match="read-only"):
            reader.touch(0)


def test_a_copied_block_is_the_same_and_the_others_are_untouched() -> None:
    """One slot onto another."""
    with SharedPool(3, 16) as pool:
        pool.slots[0] = np.arange(16)
        pool.copy_block(0, 2)
        assert pool.slots[2].tolist() == list(range(16))
        assert not pool.slots[1].any()


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(4, 9), (5, 8), (4, 7), (1 << 40, 1)])
def test_memory_of_another_size_is_refused(num_blocks: int, block_bytes: int) -> None:
    """What a door says of its pool must fit the memory that it gives; nothing stays open."""
    with SharedPool(4, 4096) as owner:
        before = open_files()
        with pytest.raises(ValueError, match="another size"):
            SharedPool(num_blocks, block_bytes * 4096, fd=os.dup(owner.fd))
        assert open_files() == before


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 8), (8, 0), (-1, 8), (8, -8)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_bytes: int) -> None:
    """Neither made nor mapped; nothing stays open."""
    before = open_files()
    with pytest.raises(ValueError, match="no pool has"):
        SharedPool(num_blocks, block_bytes)
    with SharedPool(4, 8) as owner, pytest.raises(ValueError, match="no pool has"):
        SharedPool(num_blocks, block_bytes, fd=os.dup(owner.fd))
    assert open_files() == before


def test_what_cannot_be_mapped_is_closed() -> None:
    """A descriptor that is no memory at all."""
    read, write = os.pipe()
    with pytest.raises((ValueError, OSError)):
        SharedPool(1, 1, fd=read)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    os.close(write)


def test_a_closed_pool_leaves_nothing() -> None:
    """No descriptor and no name; a view that lives longer keeps its memory, and nothing else."""
    before = open_files()
    pool = SharedPool(4, 8)
    view = pool.slots
    view[1] = 5
    pool.close()
    pool.close()
    assert (view[1] == 5).all()
    with pytest.raises(AssertionError, match="closed"):
        _ = pool.slots
    del view
    del pool
    assert open_files() == before
    assert not [name for name in os.listdir("/dev/shm") if "mesh" in name]
