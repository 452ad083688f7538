"""Reading another worker's blocks, whichever way leads there.

The addresses in a handle decide: shared memory when the owner is on this host, UCX otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, Protocol

from infra.transport.handover import PoolReader
from infra.transport.shm import SharedPool
from schemas.errors import KvLost
from schemas.kv import KvHandle

Transport = Literal["shm", "ucx"]
TRANSPORTS: tuple[Transport, ...] = ("shm", "ucx")


class RemoteReader(Protocol):
    """Reads over a network: ``infra.transport.ucx.port.UcxPort``."""

    def read(
        self,
        address: str,
        handle: KvHandle,
        into: SharedPool,
        slots: Sequence[int],
        timeout_s: float,
    ) -> None:
        """Copy and check, or KvLost; nothing is written after the end."""

    def prune(self) -> None:
        """Let go of owners that are of no use any more; does not wait."""


class KvReader:
    """Reads blocks by handle. Thread-safe; several transfers may run beside one another.

    Args:
        shm: reads what is on this host; None: it is not used.
        ucx: reads what is elsewhere; None: it is not used.
    """

    def __init__(self, shm: PoolReader | None = None, ucx: RemoteReader | None = None) -> None:
        self._shm = shm
        self._ucx = ucx

    def way(self, handle: KvHandle) -> tuple[Transport, str]:
        """How the owner is reached, and at which of its addresses.

        Raises:
            KvLost: not at all.
        """
        if self._shm is not None:
            for address in handle.addresses:
                if self._shm.reaches(address):
                    return "shm", address
        if self._ucx is not None:
            for address in handle.addresses:
                if address.startswith("ucx://"):
                    return "ucx", address
        raise KvLost(f"no address of {handle.owner} can be reached from here")

    def read(
        self, handle: KvHandle, into: SharedPool, slots: Sequence[int], deadline_s: float
    ) -> Transport:
        """Copy the blocks of ``handle`` into ``slots`` of our own pool, and check them. Waits
        until that has ended; afterwards nothing is written there.

        Args:
            deadline_s: of ``time.monotonic``. Memory of this host is read whatever it is.

        Returns:
            What brought them.

        Raises:
            KvLost: the owner is gone, silent or cut off; the lease is over, a slot recycled, a
                checksum wrong; the deadline passed; no way leads there. The slots then hold
                nothing of use.
        """
        transport, address = self.way(handle)
        if transport == "shm":
            assert self._shm is not None, "a way was found"
            self._shm.read(handle, into, slots)
            return transport
        assert self._ucx is not None, "a way was found"
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise KvLost(f"no time is left for lease {handle.lease_id}")
        self._ucx.read(address, handle, into, slots, left_s)
        return transport

    def read_at_once(self, handle: KvHandle, into: SharedPool, slots: Sequence[int]) -> bool:
        """The same for memory of this host, if there is nothing to wait for.

        Returns:
            Whether it was read; False means that nothing was done.

        Raises:
            KvLost: as ``read``.
        """
        transport, _ = self.way(handle)
        if transport != "shm":
            return False
        assert self._shm is not None, "a way was found"
        return self._shm.read_at_once(handle, into, slots)

    def prune(self) -> None:
        """Let go of owners that are gone. Does not wait."""
        for reader in (self._shm, self._ucx):
            if reader is not None:
                reader.prune()

    def close(self) -> None:
        """Unmap what is mapped, when the copy that runs has ended. UCX ends with its port."""
        if self._shm is not None:
            self._shm.close()
