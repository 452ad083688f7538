"""Handing KV blocks from one process of a host to another, by shared memory.

    owner   PoolDoor     listens on an abstract unix socket; gives the pool's descriptor to
                         whoever shows the secret of a lease that stands
    reader  PoolReader   maps the pool once per owner, copies the named slots, then checks
                         generations and checksums: only then has it read anything

The socket has no file, the memory no name: nothing is left behind. Workers of one host trust each
other with what is mapped; the secret keeps everybody else out.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from infra.log import Logger
from infra.transport.shm import SharedPool
from schemas.codec import unpack_ids
from schemas.errors import KvLost, SchemaError
from schemas.kv import KvHandle

SCHEME = "shm://"
_ANSWER_S = 1.0
_MAX_MESSAGE = 4096
_MAX_MAPPED = 64  # owners whose pools a reader keeps mapped


class _Ask(msgspec.Struct, frozen=True):
    lease_id: str
    secret: bytes


class _Grant(msgspec.Struct, frozen=True):
    num_blocks: int  # 0: refused
    block_bytes: int


def host_identity() -> str:
    """What two processes must share to reach each other here: kernel and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/net').st_ino}"


def checksums(pool: SharedPool, slots: Sequence[int]) -> bytes:
    """xxh3-64 of each slot's bytes, packed little-endian uint64."""
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(pool.slots[s])) for s in slots)


class PoolDoor:
    """Serves one pool's descriptor.

    Args:
        name: of the socket; unique on the host (a process id with its nonce).
        may_read: whether (lease id, secret) name a lease that stands.
    """

    def __init__(
        self, pool: SharedPool, name: str, may_read: Callable[[str, bytes], bool], log: Logger
    ) -> None:
        self._pool = pool
        self._name = name
        self._may_read = may_read
        self._log = log
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guests: set[socket.socket] = set()

    @property
    def address(self) -> str:
        """For handles."""
        return f"{SCHEME}{host_identity()}/{self._name}"

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            OSError: the name is taken.
        """
        self._listener.setblocking(False)
        self._listener.bind(f"\0mesh-kv/{self._name}")
        self._listener.listen(64)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    guest, _ = await loop.sock_accept(self._listener)
                    tasks.create_task(self._serve(guest))
        finally:
            self._listener.close()
            for guest in self._guests:
                guest.close()

    async def _serve(self, guest: socket.socket) -> None:
        """One guest: it asks once, and keeps the connection to notice our end."""
        self._guests.add(guest)
        guest.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_ANSWER_S):
                data = await loop.sock_recv(guest, _MAX_MESSAGE)
            ask = msgspec.msgpack.decode(data, type=_Ask)
            if self._may_read(ask.lease_id, ask.secret):
                grant = _Grant(self._pool.num_blocks, self._pool.block_bytes)
                socket.send_fds(guest, [msgspec.msgpack.encode(grant)], [self._pool.fd])
                await loop.sock_recv(guest, 1)  # until the guest leaves
            else:
                guest.send(msgspec.msgpack.encode(_Grant(0, 0)))
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            self._log.info("kv_guest_left", reason=str(error) or type(error).__name__)
        finally:
            self._guests.discard(guest)
            guest.close()


class PoolReader:
    """Reads blocks out of other workers' pools. For one thread at a time."""

    def __init__(self) -> None:
        self._here = host_identity()
        self._mapped: OrderedDict[str, tuple[socket.socket, SharedPool]] = OrderedDict()

    def read(self, handle: KvHandle, into: SharedPool, slots: Sequence[int]) -> None:
        """Copy the blocks of ``handle`` into ``slots`` of our own pool, and check them.

        Blocks the calling thread for the time of the copy.

        Raises:
            KvLost: owner gone, lease over, a slot recycled, a checksum wrong, or no address
                that can be reached from here. The slots then hold nothing of use.
        """
        source = self._pool_of(handle)
        try:
            blocks, generations = unpack_ids(handle.blocks), unpack_ids(handle.generations)
        except SchemaError as error:
            raise KvLost(f"handle {handle.lease_id}: {error.message}") from error
        if source.block_bytes != into.block_bytes or not (
            len(blocks) == len(slots) == len(generations) and max(blocks) < source.num_blocks
        ):
            raise KvLost(f"handle {handle.lease_id} does not fit the pools")
        into.slots[list(slots)] = source.slots[blocks]
        seen: npt.NDArray[np.uint32] = source.generations[blocks]
        if seen.tolist() != generations:
            raise KvLost(f"blocks of lease {handle.lease_id} were recycled")
        if checksums(into, slots) != handle.checksums:
            raise KvLost(f"blocks of lease {handle.lease_id} have another checksum")

    def prune(self) -> None:
        """Unmap the pools of owners that are gone: mapped memory is not freed."""
        for address, (connection, _) in list(self._mapped.items()):
            try:
                gone = connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                self._unmap(address)

    def close(self) -> None:
        """Unmap everything."""
        for address in list(self._mapped):
            self._unmap(address)

    def _pool_of(self, handle: KvHandle) -> SharedPool:
        prefix = f"{SCHEME}{self._here}/"
        address = next((a for a in handle.addresses if a.startswith(prefix)), None)
        if address is None:
            raise KvLost(f"no address of {handle.owner} can be reached from this host")
        if address in self._mapped:
            self._mapped.move_to_end(address)
        else:
            self._mapped[address] = _open(address.removeprefix(prefix), handle)
            if len(self._mapped) > _MAX_MAPPED:
                self._unmap(next(iter(self._mapped)))
        return self._mapped[address][1]

    def _unmap(self, address: str) -> None:
        connection, pool = self._mapped.pop(address)
        pool.close()
        connection.close()


def _open(name: str, handle: KvHandle) -> tuple[socket.socket, SharedPool]:
    """Ask a door for its pool."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(f"\0mesh-kv/{name}")
        connection.send(msgspec.msgpack.encode(_Ask(handle.lease_id, handle.secret)))
        data, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1)
        grant = msgspec.msgpack.decode(data, type=_Grant)
        if not descriptors:
            raise KvLost(f"{handle.owner} gives nothing for lease {handle.lease_id}")
        pool = SharedPool(grant.num_blocks, grant.block_bytes, fd=descriptors[0])
        connection.setblocking(False)  # from here on it only shows whether the owner lives
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        connection.close()
        raise KvLost(f"the pool of {handle.owner} can't be reached: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection, pool
