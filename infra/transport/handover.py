"""Handing KV blocks from one process of a host to another, by shared memory.

    owner   PoolDoor     listens on an abstract unix socket; gives the pool's descriptor to
                         whoever shows the secret of a lease that stands
    reader  PoolReader   maps the pool once per owner, copies the named slots, then checks
                         generations and checksums: only then has it read anything

The socket has no file, the memory no name: nothing is left behind. Workers of one host trust each
other with what is mapped; the secret keeps everybody else out. Memory that is mapped outlives its
owner: what a dead worker had computed can be read as long as its blocks pass the checks.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from infra.log import Logger
from infra.transport.shm import SharedPool
from infra.transport.wanted import Wanted
from schemas.errors import KvLost
from schemas.kv import KvHandle

SCHEME = "shm://"
_ANSWER_S = 1.0
_ACCEPT_RETRY_S = 0.1  # out of descriptors: some guest leaves
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
        self._knock = _Ask(f"knock-{secrets.token_hex(8)}", secrets.token_bytes(16))

    @property
    def address(self) -> str:
        """For handles."""
        return f"{SCHEME}{host_identity()}/{self._name}"

    async def run(self) -> None:
        """Serve until cancelled; guests see the connection end then.

        Raises:
            OSError: the name is taken.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.setblocking(False)
            listener.bind(f"\0mesh-kv/{self._name}")
            listener.listen(64)
            async with asyncio.TaskGroup() as tasks:
                while True:
                    guest = await self._accept(listener)
                    tasks.create_task(self._serve(guest))

    async def knock(self) -> None:
        """Be our own guest: whoever holds a lease would be let in now.

        Raises:
            KvLost: nobody answered within some seconds, or refused us.
        """
        await asyncio.to_thread(self._enter)

    def _enter(self) -> None:
        _open(self._name, self._name, self._knock).close()

    async def _accept(self, listener: socket.socket) -> socket.socket:
        while True:
            try:
                guest, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                self._log.warning("kv_door_stuck", reason=str(error))
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            return guest

    async def _serve(self, guest: socket.socket) -> None:
        """One guest: it asks once, and keeps the connection to notice our end."""
        loop = asyncio.get_running_loop()
        with guest:
            guest.setblocking(False)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    data = await loop.sock_recv(guest, _MAX_MESSAGE)
                if self._answer(guest, data):
                    await loop.sock_recv(guest, 1)  # until the guest leaves
            except (OSError, TimeoutError, msgspec.MsgspecError) as error:
                self._log.info("kv_guest_left", reason=str(error) or type(error).__name__)

    def _answer(self, guest: socket.socket, data: bytes) -> bool:
        """Let the guest in or not; whether it was let in."""
        ask = msgspec.msgpack.decode(data, type=_Ask)
        if ask != self._knock and not self._may_read(ask.lease_id, ask.secret):
            guest.send(msgspec.msgpack.encode(_Grant(0, 0)))
            return False
        grant = _Grant(self._pool.num_blocks, self._pool.block_bytes)
        socket.send_fds(guest, [msgspec.msgpack.encode(grant)], [self._pool.fd])
        return True


class _Mapped(NamedTuple):
    connection: socket.socket  # says nothing; ends with the owner
    pool: SharedPool

    def is_orphan(self) -> bool:
        """Whether the owner is gone. Does not wait."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.pool.close()
        self.connection.close()


class PoolReader:
    """Reads blocks out of other workers' pools. One thread reads at a time, others wait.

    Args:
        max_mapped: owners whose pools stay mapped.
    """

    def __init__(self, *, max_mapped: int = _MAX_MAPPED) -> None:
        self._here = host_identity()
        self._max_mapped = max_mapped
        self._mapped: OrderedDict[str, _Mapped] = OrderedDict()  # last used last
        self._lock = threading.Lock()

    def reaches(self, address: str) -> bool:
        """Whether it is shared memory of this host."""
        return address.startswith(f"{SCHEME}{self._here}/")

    def read(self, handle: KvHandle, into: SharedPool, slots: Sequence[int]) -> None:
        """Copy the blocks of ``handle`` into ``slots`` of our own pool, and check them.

        Blocks the calling thread for the time of the copy, and up to a second longer when the
        owner is read for the first time.

        Raises:
            KvLost: owner gone, lease over, a slot recycled, a checksum wrong, or no address
                that can be reached from here. The slots then hold nothing of use.
        """
        with self._lock:
            self._read(self._address_of(handle), handle, into, slots)

    def read_at_once(self, handle: KvHandle, into: SharedPool, slots: Sequence[int]) -> bool:
        """The same, if there is nothing to wait for: the owner has been read before, and nobody
        reads now.

        Returns:
            Whether it was read; False means that nothing was done.
        """
        address = self._address_of(handle)
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if address not in self._mapped:
                return False
            self._read(address, handle, into, slots)
        finally:
            self._lock.release()
        return True

    def prune(self) -> None:
        """Unmap the pools of owners that are gone: mapped memory is not freed. Never waits: what
        is being read now is looked at the next time."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for address, mapped in list(self._mapped.items()):
                if mapped.is_orphan():
                    self._unmap(address)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Unmap everything, when the copy that runs has ended."""
        with self._lock:
            for address in list(self._mapped):
                self._unmap(address)

    def _read(self, address: str, handle: KvHandle, into: SharedPool, slots: Sequence[int]) -> None:
        source = self._pool_at(address, handle)
        try:
            _copy(handle, source, into, slots)
        except KvLost:
            if self._mapped[address].is_orphan():
                self._unmap(address)  # the next one asks whoever has the address now
            raise

    def _address_of(self, handle: KvHandle) -> str:
        for address in handle.addresses:
            if self.reaches(address):
                return address
        raise KvLost(f"no address of {handle.owner} can be reached from this host")

    def _pool_at(self, address: str, handle: KvHandle) -> SharedPool:
        if address in self._mapped:
            self._mapped.move_to_end(address)
        else:
            name = address.removeprefix(f"{SCHEME}{self._here}/")
            ask = _Ask(handle.lease_id, handle.secret)
            self._mapped[address] = _open(name, handle.owner, ask)
            if len(self._mapped) > self._max_mapped:
                self._unmap(next(iter(self._mapped)))
        return self._mapped[address].pool

    def _unmap(self, address: str) -> None:
        self._mapped.pop(address).close()


def _copy(handle: KvHandle, source: SharedPool, into: SharedPool, slots: Sequence[int]) -> None:
    """Copy, then check. Each block is checked while what was copied is in the cache."""
    wanted = Wanted.of(handle, into, slots)
    if source.block_bytes != into.block_bytes or max(wanted.blocks) >= source.num_blocks:
        raise KvLost(f"handle {handle.lease_id} does not fit the pools")
    for index, (block, slot) in enumerate(zip(wanted.blocks, slots, strict=True)):
        into.slots[slot] = source.slots[block]
        wanted.check_bytes(index, into)
    wanted.check_generations(0, source.generations[wanted.blocks].tolist())


def _open(name: str, owner: str, ask: _Ask) -> _Mapped:
    """Ask a door for its pool."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(f"\0mesh-kv/{name}")
        connection.send(msgspec.msgpack.encode(ask))
        pool = _receive_pool(connection, owner, ask)
        connection.setblocking(False)
    except (OSError, ValueError) as error:
        connection.close()
        raise KvLost(f"the pool of {owner} can't be reached: {error}") from error
    except BaseException:
        connection.close()
        raise
    return _Mapped(connection, pool)


def _receive_pool(connection: socket.socket, owner: str, ask: _Ask) -> SharedPool:
    data, descriptors, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise KvLost(f"{owner} gives nothing for lease {ask.lease_id}")
    try:
        grant = msgspec.msgpack.decode(data, type=_Grant)
    except msgspec.MsgspecError as error:
        os.close(descriptors[0])
        raise KvLost(f"{owner} gives no pool: {error}") from error
    return SharedPool(grant.num_blocks, grant.block_bytes, fd=descriptors[0])
