"""Reading another worker's blocks: what is read is right, or it is KvLost, and nothing leaks.

Owner and reader are two ends of real sockets and real memory in one process; the owner that dies
is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.transport import handover
from infra.transport.handover import PoolDoor, PoolReader, checksums, host_identity
from infra.transport.shm import SharedPool
from schemas.codec import pack_ids
from schemas.errors import KvLost
from schemas.kv import KvHandle
from tests.infra.transport.test_shm import open_files

NUM_BLOCKS, BLOCK_BYTES = 16, 64
SECRET = b"0123456789abcdef"


@dataclass
class Owner:
    """A pool with something in it, its door, and the leases that stand."""

    pool: SharedPool
    name: str
    leases: dict[str, bytes] = field(default_factory=lambda: {"lease": SECRET})
    num_asked: int = 0

    @property
    def address(self) -> str:
        return f"shm://{host_identity()}/{self.name}"

    def may_read(self, lease_id: str, secret: bytes) -> bool:
        self.num_asked += 1
        return self.leases.get(lease_id) == secret

    def handle(self, blocks: list[int], /, **changes: Any) -> KvHandle:
        """A right handle of these blocks, but for ``changes``."""
        right = {
            "lease_id": "lease",
            "secret": SECRET,
            "owner": "owner",
            "fingerprint": "f",
            "num_tokens": len(blocks),
            "blocks": pack_ids(blocks),
            "generations": pack_ids(self.pool.generations[blocks].tolist()),
            "checksums": checksums(self.pool, blocks),
            "addresses": (self.address,),
            "expires_unix_ms": 0,
        }
        return KvHandle(**{**right, **changes})


@contextlib.asynccontextmanager
async def open_door(owner: Owner) -> AsyncIterator[PoolDoor]:
    door = PoolDoor(owner.pool, owner.name, owner.may_read, structlog.get_logger("test"))
    assert door.address == owner.address
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(door.run())
        await asyncio.sleep(0)  # it listens
        yield door
        running.cancel()


@pytest.fixture
def owner() -> Iterator[Owner]:
    with SharedPool(NUM_BLOCKS, BLOCK_BYTES) as pool:
        pool.slots[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None] + 1
        yield Owner(pool, f"test-{secrets.token_hex(8)}")


@pytest.fixture
def into() -> Iterator[SharedPool]:
    with SharedPool(NUM_BLOCKS, BLOCK_BYTES) as pool:
        yield pool


@pytest.fixture
def reader() -> Iterator[PoolReader]:
    """Closed at the end; no descriptor of the test is left then."""
    before = open_files()
    made = PoolReader()
    yield made
    made.close()
    assert open_files() == before


async def read(reader: PoolReader, handle: KvHandle, into: SharedPool, slots: list[int]) -> None:
    async with asyncio.timeout(60):
        await asyncio.to_thread(reader.read, handle, into, slots)


async def test_blocks_arrive_in_their_slots(
    owner: Owner, into: SharedPool, reader: PoolReader
) -> None:
    """Any blocks into any slots, in the order of the handle; other slots are not touched, and the
    door is asked once per owner, not once per lease."""
    async with open_door(owner):
        await read(reader, owner.handle([3, 0, 9]), into, [5, 2, 11])
        assert [int(into.slots[slot, 0]) for slot in (5, 2, 11)] == [4, 1, 10]
        assert int(into.slots.astype(int).sum()) == (4 + 1 + 10) * BLOCK_BYTES
        await read(reader, owner.handle([1], lease_id="another"), into, [0])
        assert owner.num_asked == 1


async def test_a_known_owner_is_read_at_once(
    owner: Owner, into: SharedPool, reader: PoolReader
) -> None:
    """Without waiting for anybody: not before the first read, and not beside another one."""
    async with open_door(owner):
        handle = owner.handle([3])
        assert not reader.read_at_once(handle, into, [0])
        await read(reader, handle, into, [0])
        assert reader.read_at_once(owner.handle([4]), into, [1])
        assert int(into.slots[1, 0]) == 5
        with reader._lock:
            assert not reader.read_at_once(handle, into, [0])
        with pytest.raises(KvLost):
            reader.read_at_once(owner.handle([4], checksums=bytes(8)), into, [1])


WRONG: dict[str, dict[str, Any]] = {
    "secret": {"secret": b"guess"},
    "no secret": {"secret": b""},
    "lease": {"lease_id": "ended"},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
async def test_without_a_lease_the_door_gives_nothing(
    owner: Owner, into: SharedPool, reader: PoolReader, changes: dict[str, Any]
) -> None:
    """Refused; the pool is not mapped, and a right handle works afterwards."""
    async with open_door(owner):
        with pytest.raises(KvLost, match="gives nothing"):
            await read(reader, owner.handle([1], **changes), into, [0])
        assert not into.slots.any()
        assert not reader._mapped
        await read(reader, owner.handle([1]), into, [0])


UNFIT: dict[str, dict[str, Any]] = {
    "no blocks": {"blocks": b"", "generations": b"", "checksums": b""},
    "fewer blocks than slots": {"blocks": pack_ids([1])},
    "more blocks than slots": {"blocks": pack_ids([1, 2, 3])},
    "a block outside the pool": {"blocks": pack_ids([1, NUM_BLOCKS])},
    "a block far outside": {"blocks": pack_ids([1, 2**32 - 1])},
    "half an id": {"blocks": pack_ids([1, 2])[:-1]},
    "generations missing": {"generations": pack_ids([0])},
    "half a generation": {"generations": b"\0\0\0"},
    "checksums missing": {"checksums": b""},
    "checksums not computed": {"checksums": bytes(16)},
    "one checksum too many": {"checksums": bytes(24)},
    "no address": {"addresses": ()},
    "an address on another host": {"addresses": ("shm://elsewhere.1/x",)},
    "an unknown scheme": {"addresses": ("ucx://here", "http://x", "")},
    "nobody at the address": {"addresses": (f"shm://{host_identity()}/nobody",)},
    "an address too long": {"addresses": (f"shm://{host_identity()}/{'x' * 200}",)},
    "an empty name": {"addresses": (f"shm://{host_identity()}/",)},
}


@pytest.mark.parametrize("changes", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("is_mapped", [False, True])
async def test_a_handle_that_does_not_fit_is_lost(
    owner: Owner, into: SharedPool, reader: PoolReader, changes: dict[str, Any], is_mapped: bool
) -> None:
    """KvLost, never another exception, and the reader goes on."""
    async with open_door(owner):
        if is_mapped:
            await read(reader, owner.handle([1]), into, [0])
        with pytest.raises(KvLost):
            await read(reader, owner.handle([1, 2], **changes), into, [0, 1])
        await read(reader, owner.handle([1, 2]), into, [0, 1])


async def test_pools_of_another_geometry_are_lost(owner: Owner, reader: PoolReader) -> None:
    """Blocks of another size can't be ours."""
    async with open_door(owner):
        with SharedPool(4, BLOCK_BYTES * 2) as other, pytest.raises(KvLost, match="fit"):
            await read(reader, owner.handle([1]), other, [0])


async def test_recycled_slots_are_lost(owner: Owner, into: SharedPool, reader: PoolReader) -> None:
    """The owner gave a slot to somebody else: the generation tells, even with the same bytes."""
    async with open_door(owner):
        handle = owner.handle([1, 2])
        owner.pool.touch(2)
        with pytest.raises(KvLost, match="recycled"):
            await read(reader, handle, into, [0, 1])


async def test_an_ended_lease_of_a_mapped_pool_reads_right_or_not_at_all(
    owner: Owner, into: SharedPool, reader: PoolReader
) -> None:
    """The door is not asked again; as long as nobody has the slots, their content is right."""
    async with open_door(owner):
        await read(reader, owner.handle([1]), into, [0])
        handle = owner.handle([4])
        owner.leases.clear()
        await read(reader, handle, into, [0])
        assert int(into.slots[0, 0]) == 5
        owner.pool.touch(4)
        owner.pool.slots[4] = 99
        with pytest.raises(KvLost):
            await read(reader, handle, into, [0])


@settings(max_examples=60, deadline=None)
@given(block=st.integers(0, 2), byte=st.integers(0, BLOCK_BYTES - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(block: int, byte: int, bit: int) -> None:
    """Whichever of the bytes it is in."""
    with SharedPool(4, BLOCK_BYTES) as pool, SharedPool(4, BLOCK_BYTES) as into:
        pool.slots[:] = np.frombuffer(os.urandom(4 * BLOCK_BYTES), np.uint8).reshape(4, -1)
        handle = Owner(pool, "x").handle([0, 1, 2])
        handover._copy(handle, pool, into, [3, 1, 0])
        pool.slots[block, byte] ^= 1 << bit
        with pytest.raises(KvLost, match="checksum"):
            handover._copy(handle, pool, into, [3, 1, 0])


async def test_a_copy_that_the_owner_overtakes_is_lost(
    owner: Owner, into: SharedPool, reader: PoolReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recycled after the copy began and before it was checked: both are noticed afterwards."""

    class Racing(SharedPool):
        """Recycles a slot right when its generation is about to be read."""

        @property
        def generations(self) -> Any:
            owner.pool.touch(2)
            return super().generations

    monkeypatch.setattr(handover, "SharedPool", Racing)
    async with open_door(owner):
        with pytest.raises(KvLost, match="recycled"):
            await read(reader, owner.handle([1, 2]), into, [0, 1])


# -- owners that go --------------------------------------------------------------------------

_CHILD = """
import asyncio, sys
import structlog
from infra.transport.handover import PoolDoor
from infra.transport.shm import SharedPool

async def main():
    pool = SharedPool(16, 64)
    pool.slots[:] = int(sys.argv[2])
    door = PoolDoor(pool, sys.argv[1], lambda lease_id, secret: True, structlog.get_logger())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(door.run())
        await asyncio.sleep(0)
        print("open", flush=True)

asyncio.run(main())
"""


@contextlib.contextmanager
def other_process(name: str, content: int) -> Iterator[subprocess.Popen[str]]:
    """An owner in a process of its own, its pool full of ``content``."""
    command = [sys.executable, "-c", _CHILD, name, str(content)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


async def test_what_a_dead_owner_computed_can_still_be_read(
    owner: Owner, into: SharedPool, reader: PoolReader
) -> None:
    """A worker killed after KvReady: its memory lives while it is mapped, its blocks are right.
    Then it is let go of, and the address is nobody's."""
    owner.pool.slots[:] = 42
    with other_process(owner.name, 42) as process:
        await read(reader, owner.handle([1]), into, [0])
        process.kill()
        process.wait()
        await read(reader, owner.handle([7]), into, [3])
        assert (into.slots[3] == 42).all()
        reader.prune()
        assert not reader._mapped
        with pytest.raises(KvLost, match="can't be reached"):
            await read(reader, owner.handle([7]), into, [3])


async def test_an_owner_that_came_back_under_its_old_name_is_not_confused_with_the_old_one(
    owner: Owner, into: SharedPool, reader: PoolReader
) -> None:
    """Its handle fails on the old memory; the next one finds the new owner."""
    owner.pool.slots[:] = 42
    with other_process(owner.name, 42) as process:
        await read(reader, owner.handle([1]), into, [0])
        process.kill()
        process.wait()
    owner.pool.slots[:] = 43
    with other_process(owner.name, 43):
        with pytest.raises(KvLost, match="checksum"):
            await read(reader, owner.handle([1]), into, [0])
        await read(reader, owner.handle([1]), into, [0])
        assert (into.slots[0] == 43).all()


class Impostor:
    """Listens under a name and says what it is told to."""

    def __init__(self, name: str, answer: bytes | None, fds: list[int]) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0mesh-kv/{name}")
        self._listener.listen()
        self._answer, self._fds = answer, fds
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        guest, _ = self._listener.accept()
        with guest:
            guest.recv(4096)
            if self._answer is None:
                guest.recv(1)  # says nothing until the guest leaves
            elif self._fds:
                socket.send_fds(guest, [self._answer], self._fds)
            else:
                guest.send(self._answer)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


GRANT = msgspec.msgpack.encode({"num_blocks": NUM_BLOCKS, "block_bytes": BLOCK_BYTES})
LIES: dict[str, tuple[bytes | None, bool]] = {
    "silence": (None, False),
    "nonsense": (b"\xc1\xff", False),
    "nonsense with memory": (b"\xc1\xff", True),
    "a grant without memory": (GRANT, False),
    "memory of another size": (
        msgspec.msgpack.encode({"num_blocks": 1, "block_bytes": 1}),
        True,
    ),
    "memory of no size": (msgspec.msgpack.encode({"num_blocks": 0, "block_bytes": 0}), True),
    "memory of a negative size": (
        msgspec.msgpack.encode({"num_blocks": -1, "block_bytes": 64}),
        True,
    ),
}


@pytest.mark.parametrize(("answer", "gives"), LIES.values(), ids=LIES)
async def test_a_door_that_lies_is_no_door(
    owner: Owner,
    into: SharedPool,
    reader: PoolReader,
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes | None,
    gives: bool,
) -> None:
    """Silence, nonsense, memory that is not what it is said to be: KvLost, nothing mapped, no
    descriptor kept (the fixture looks)."""
    monkeypatch.setattr(handover, "_ANSWER_S", 0.1)
    impostor = Impostor(owner.name, answer, [owner.pool.fd] if gives else [])
    with pytest.raises(KvLost):
        await read(reader, owner.handle([1]), into, [0])
    impostor.close()
    assert not reader._mapped


# -- doors -----------------------------------------------------------------------------------


async def test_guests_that_say_nonsense_or_nothing_are_shown_out(
    owner: Owner, into: SharedPool, reader: PoolReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that know what they want are served meanwhile."""
    monkeypatch.setattr(handover, "_ANSWER_S", 0.2)
    async with open_door(owner):
        guests = []
        for word in (b"\xc1", b"{}", b"x" * 4000, None):
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            guest.connect(f"\0mesh-kv/{owner.name}")
            if word is not None:
                guest.send(word)
            guests.append(guest)
        await read(reader, owner.handle([1]), into, [0])
        for guest in guests:
            guest.settimeout(5)
            assert await asyncio.to_thread(guest.recv, 1) == b""
            guest.close()


async def test_a_closed_door_leaves_its_name(owner: Owner) -> None:
    """Every socket is closed, and the name is free again."""
    for _ in range(3):
        async with open_door(owner):
            guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            guest.connect(f"\0mesh-kv/{owner.name}")
        guest.close()


async def test_a_name_is_one_owners(owner: Owner) -> None:
    """Two owners of one name would give each other's memory away."""
    async with open_door(owner):
        twin = PoolDoor(owner.pool, owner.name, owner.may_read, structlog.get_logger("test"))
        with pytest.raises(OSError, match="in use"):
            await twin.run()


async def test_the_least_used_owners_are_let_go(into: SharedPool) -> None:
    """Mapped pools are bounded; one let go is mapped again when it is wanted."""
    reader = PoolReader(max_mapped=2)
    async with contextlib.AsyncExitStack() as stack:
        owners = []
        for number in range(3):
            pool = stack.enter_context(SharedPool(NUM_BLOCKS, BLOCK_BYTES))
            pool.slots[:] = number
            owners.append(Owner(pool, f"test-{secrets.token_hex(8)}"))
            await stack.enter_async_context(open_door(owners[-1]))
        for number in (0, 1, 0, 2, 1, 0):
            await read(reader, owners[number].handle([1]), into, [0])
            assert (into.slots[0] == number).all()
            assert len(reader._mapped) <= 2
        assert [one.num_asked for one in owners] == [2, 2, 1]
        reader.close()
