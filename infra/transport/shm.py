"""A KV pool in shared memory, and reading blocks out of another process's pool.

One memfd holds the whole pool::

    [0, header)               generations: uint32 per slot, raised whenever a slot changes hands
    [header, end)             slots: num_blocks * block_bytes, slot b at header + b * block_bytes

Nothing is left in /dev/shm: the memory lives as long as a process maps it. The owner hands the
descriptor over a unix socket (see ``handover``); a reader copies bytes and compares generations
afterwards, so a slot that was recycled during the copy is noticed.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE = mmap.PAGESIZE


def _header_bytes(num_blocks: int) -> int:
    return -(-num_blocks * 4 // _PAGE) * _PAGE


class SharedPool:
    """The memory of one KV pool: ``num_blocks`` slots of ``block_bytes`` bytes.

    Args:
        fd: None makes a new pool; else the descriptor of another process's pool to map
            (read-only). The pool owns the descriptor and closes it, also when this raises.

    Raises:
        ValueError: the pool would hold nothing, or ``fd`` is no pool of this size.
        OSError: no memory for it, or ``fd`` can't be mapped.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, fd: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        header = _header_bytes(num_blocks)
        size = header + num_blocks * block_bytes
        self.is_owner = fd is None
        self.fd = os.memfd_create("mesh-kv", os.MFD_CLOEXEC) if fd is None else fd
        try:
            self._map = self._mapping(size)
        except BaseException:
            os.close(self.fd)
            raise
        self._generations: npt.NDArray[np.uint32] | None = np.frombuffer(
            self._map, np.uint32, num_blocks
        )
        self._counters = memoryview(self._map)[: num_blocks * 4].cast("I")  # the same, for touch()
        self._slots: npt.NDArray[np.uint8] | None = np.frombuffer(
            self._map, np.uint8, num_blocks * block_bytes, header
        ).reshape(num_blocks, block_bytes)

    def _mapping(self, size: int) -> mmap.mmap:
        if self.num_blocks < 1 or self.block_bytes < 1:
            raise ValueError(f"no pool has {self.num_blocks} x {self.block_bytes} bytes")
        if self.is_owner:
            os.ftruncate(self.fd, size)
        elif os.fstat(self.fd).st_size != size:
            raise ValueError(
                f"a pool of {self.num_blocks} x {self.block_bytes} bytes has another size"
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.is_owner else 0)
        return mmap.mmap(self.fd, size, mmap.MAP_SHARED, protection)

    @property
    def generations(self) -> npt.NDArray[np.uint32]:
        """[num_blocks] uint32, a view."""
        assert self._generations is not None, "pool is closed"
        return self._generations

    @property
    def slots(self) -> npt.NDArray[np.uint8]:
        """[num_blocks, block_bytes] uint8, a view of the shared memory."""
        assert self._slots is not None, "pool is closed"
        return self._slots

    def touch(self, slot: int) -> None:
        """Raise the slot's generation: whoever still reads it under an old one will notice."""
        self._counters[slot] = self._counters[slot] + 1 & 0xFFFF_FFFF

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot onto another."""
        self.slots[target] = self.slots[source]

    def close(self) -> None:
        """Unmap and close. Views handed out before must be gone; if not, the map stays until
        they are, and only the descriptor is closed."""
        self._counters.release()
        self._generations = None
        self._slots = None
        try:
            self._map.close()
        except BufferError:
            pass  # a tensor still views the pool; the kernel frees it with the last view
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
