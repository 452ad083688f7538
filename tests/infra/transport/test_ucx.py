"""Reading over UCX: what is read is right, or it is KvLost in time, and others are not disturbed.

Owners are processes of their own, and so can be frozen and killed in mid-transfer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import structlog

from infra.transport.shm import SharedPool
from schemas.codec import pack_ids
from schemas.errors import ConfigError, KvLost
from schemas.kv import KvHandle
from tests.infra.transport.ucx_owners import PATIENCE_S, Child, holds, owner_process

pytestmark = pytest.mark.ucx
pytest.importorskip("ucxx", reason="needs the extra ucx")

from infra.transport.ucx.link import UcxContext, UcxLink  # noqa: E402
from infra.transport.ucx.port import UcxPort  # noqa: E402
from infra.transport.ucx.reader import chunks_of  # noqa: E402
from infra.transport.ucx.wire import CHUNK_BYTES, WINDOW  # noqa: E402

HOST = "127.0.0.1"
NUM_BLOCKS, BLOCK_BYTES = 24, CHUNK_BYTES  # a chunk each: the steps of a transfer can be counted
log = structlog.get_logger("test")


def nobody(lease_id: str, secret: bytes) -> bool:
    return False


@pytest.fixture(scope="module")
def into() -> Iterator[SharedPool]:
    with SharedPool(NUM_BLOCKS, BLOCK_BYTES) as pool:
        yield pool


@pytest.fixture
def port(into: SharedPool) -> Iterator[UcxPort]:
    """The reader's end, its blocks empty; at the end nothing of it is left."""
    into.slots[:] = 0
    threads = threading.active_count()
    made = UcxPort(into, nobody, HOST, 0, log)
    made.start()
    yield made
    made.stop()
    assert threading.active_count() == threads
    assert made.ended.exception() is None


@pytest.fixture(scope="module")
def steady() -> Iterator[Child]:
    """An owner that no test breaks."""
    with owner_process(NUM_BLOCKS, BLOCK_BYTES) as owner:
        yield owner


@pytest.fixture(scope="module")
def _moody() -> Iterator[Child]:
    with owner_process(NUM_BLOCKS, BLOCK_BYTES) as owner:
        yield owner


@pytest.fixture
def owner(_moody: Child) -> Iterator[Child]:
    """An owner with moods; they end with the test."""
    yield _moody
    os.kill(_moody.process.pid, signal.SIGCONT)
    _moody.tell("slow 0")
    _moody.tell("stand")


def read(
    port: UcxPort,
    handle: KvHandle,
    into: SharedPool,
    slots: list[int],
    timeout_s: float = PATIENCE_S,
) -> None:
    port.read(handle.addresses[0], handle, into, slots, timeout_s)


ALL = list(range(NUM_BLOCKS))
GEOMETRIES = {
    "tiny blocks": (3000, 64),
    "some blocks to a chunk, of an odd size": (40, 300_001),
    "chunks to a block": (3, 2 * CHUNK_BYTES + 4097),
}


@pytest.mark.parametrize(("num_blocks", "block_bytes"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_blocks_of_any_size_arrive_in_their_slots(num_blocks: int, block_bytes: int) -> None:
    """In the order of the handle, whatever the order in which they lie here or there."""
    rng = np.random.default_rng(7)
    blocks = rng.permutation(num_blocks).tolist()
    slots = rng.permutation(num_blocks).tolist()
    with (
        SharedPool(num_blocks, block_bytes) as into,
        owner_process(num_blocks, block_bytes) as owner,
    ):
        port = UcxPort(into, nobody, HOST, 0, log)
        port.start()
        try:
            read(port, owner.handle(blocks), into, slots)
            assert holds(into, slots, blocks)
        finally:
            port.stop()


def test_a_transfer_is_cut_into_all_of_its_bytes() -> None:
    """Each byte of each block once, in messages that fit their buffers."""
    for num_blocks, block_bytes in GEOMETRIES.values():
        seen = np.zeros(num_blocks * block_bytes, np.uint8)
        for chunk in chunks_of(range(num_blocks), block_bytes):
            assert 0 < chunk.size <= CHUNK_BYTES
            start = chunk.first * block_bytes + chunk.start
            seen[start : start + chunk.size] += 1
        assert (seen == 1).all()


def test_other_slots_are_left_alone(port: UcxPort, steady: Child, into: SharedPool) -> None:
    """Only those that were asked for are written."""
    read(port, steady.handle([3, 0]), into, [5, 2])
    assert holds(into, [5, 2], [3, 0])
    assert not np.delete(into.slots, [5, 2], axis=0).any()


WRONG = {
    "secret": {"secret": b"guess"},
    "no secret": {"secret": b""},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("is_connected", [False, True])
def test_without_the_secret_nothing_comes(
    port: UcxPort,
    steady: Child,
    into: SharedPool,
    changes: dict[str, bytes],
    is_connected: bool,
) -> None:
    """Neither a connection nor, on one that another lease opened, a byte; the right one is served
    before and after."""
    right = steady.handle([1])
    if is_connected:
        read(port, right, into, [0])
        into.slots[0] = 0
    with pytest.raises(KvLost, match="gives nothing"):
        read(port, msgspec.structs.replace(right, **changes), into, [0])
    assert not into.slots.any()
    read(port, right, into, [0])
    assert holds(into, [0], [1])


def test_an_ended_lease_gives_nothing(port: UcxPort, owner: Child, into: SharedPool) -> None:
    """Released or expired before the reader came, or while it reads: what was asked for after
    that does not come."""
    handle = owner.handle(ALL)
    owner.tell("at 8 end")
    with pytest.raises(KvLost, match="gives nothing"):
        read(port, handle, into, ALL)
    assert not into.slots[-1].any()
    with pytest.raises(KvLost, match="gives nothing"):
        read(port, handle, into, ALL)
    owner.tell("stand")
    read(port, handle, into, ALL)
    assert holds(into, ALL, ALL)


def test_a_recycled_slot_is_lost(port: UcxPort, owner: Child, into: SharedPool) -> None:
    """Its generation is another, though the bytes are the same."""
    handle = owner.handle([1, 2, 3])
    owner.tell("touch 2")
    with pytest.raises(KvLost, match="recycled"):
        read(port, handle, into, [0, 1, 2])
    read(port, owner.handle([1, 2, 3]), into, [0, 1, 2])


def test_a_flipped_bit_is_noticed(port: UcxPort, owner: Child, into: SharedPool) -> None:
    """The last one of the last block."""
    handle = owner.handle([1, 2, 3])
    owner.tell("flip 3")
    with pytest.raises(KvLost, match="checksum"):
        read(port, handle, into, [0, 1, 2])
    owner.tell("flip 3")
    read(port, handle, into, [0, 1, 2])


UNFIT = {
    "no blocks": {"blocks": b"", "generations": b"", "checksums": b""},
    "more blocks than slots": {"blocks": pack_ids([1, 2, 3])},
    "a block outside the pool": {"blocks": pack_ids([1, NUM_BLOCKS])},
    "half an id": {"blocks": pack_ids([1, 2])[:-1]},
    "generations missing": {"generations": pack_ids([0])},
    "checksums missing": {"checksums": b""},
}


@pytest.mark.parametrize("changes", UNFIT.values(), ids=UNFIT)
def test_a_handle_that_does_not_fit_is_lost(
    port: UcxPort, steady: Child, into: SharedPool, changes: dict[str, bytes]
) -> None:
    """KvLost, never another exception, and the reader goes on."""
    right = steady.handle([1, 2])
    with pytest.raises(KvLost):
        read(port, msgspec.structs.replace(right, **changes), into, [0, 1])
    read(port, right, into, [0, 1])


@pytest.mark.parametrize(
    "address", ["ucx://", "ucx://nowhere", "ucx://127.0.0.1:x", "ucx://127.0.0.1:1", "ucx://:1"]
)
def test_nobody_at_an_address_is_lost(
    port: UcxPort, steady: Child, into: SharedPool, address: str
) -> None:
    """Whatever is written there."""
    with pytest.raises(KvLost):
        port.read(address, steady.handle([1]), into, [0], PATIENCE_S)


def test_pools_of_another_geometry_are_lost(port: UcxPort, steady: Child) -> None:
    """Blocks of another size can't be ours."""
    with SharedPool(4, BLOCK_BYTES // 2) as other, pytest.raises(KvLost, match="fit"):
        read(port, steady.handle([1]), other, [0])


# -- owners that go --------------------------------------------------------------------------


def test_a_killed_owner_is_noticed_at_once(port: UcxPort, steady: Child, into: SharedPool) -> None:
    """In mid-transfer, long before any deadline; others go on."""
    with owner_process(NUM_BLOCKS, BLOCK_BYTES) as owner:
        handle = owner.handle(ALL)
        owner.tell("at 9 die")
        with pytest.raises(KvLost):
            read(port, handle, into, ALL)
        owner.process.wait()
    read(port, steady.handle(ALL), into, ALL)
    assert holds(into, ALL, ALL)


@pytest.mark.parametrize("timeout_s", [0.5, PATIENCE_S])
def test_a_frozen_owner_is_given_up(
    port: UcxPort,
    owner: Child,
    steady: Child,
    into: SharedPool,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
) -> None:
    """At the deadline, or when nothing has come for some seconds. After that nothing is written
    into the slots, though the owner wakes up and sends the rest; others are read meanwhile."""
    monkeypatch.setattr("infra.transport.ucx.connection.STALLED_S", 1.0)
    handle = owner.handle(ALL)
    owner.tell("at 9 stop")
    with pytest.raises(KvLost):
        read(port, handle, into, ALL, timeout_s)
    read(port, steady.handle(ALL), into, ALL)
    into.slots[:] = 7
    os.kill(owner.process.pid, signal.SIGCONT)
    owner.tell("touch 0")  # it is awake, and has sent what it was asked for
    read(port, owner.handle([1]), into, [0])
    assert holds(into, [0], [1])
    assert (into.slots[1:] == 7).all()


def test_transfers_take_turns(port: UcxPort, owner: Child, into: SharedPool) -> None:
    """A small one that comes while a large one runs waits for a few chunks, not for all of them;
    both are right."""
    owner.tell("slow 0.02")
    large, small = owner.handle(ALL[:-1]), owner.handle(ALL[-1:])
    order: list[str] = []

    def reads(name: str, handle: KvHandle, slots: list[int]) -> None:
        read(port, handle, into, slots)
        order.append(name)

    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(reads, "large", large, ALL[:-1])
        wait_until(lambda: into.slots[WINDOW - 1].any())
        threads.submit(reads, "small", small, ALL[-1:]).result()
        running.result()
    assert order == ["small", "large"]
    assert holds(into, ALL, ALL)


def test_a_reader_that_stops_ends_its_transfers(owner: Child, into: SharedPool) -> None:
    """Whoever waits for them is told; the owner serves others."""
    owner.tell("slow 0.05")
    handle = owner.handle(ALL)
    into.slots[:] = 0
    port = UcxPort(into, nobody, HOST, 0, log)
    port.start()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read, port, handle, into, ALL)
        wait_until(lambda: into.slots[0].any())
        port.stop()
        with pytest.raises(KvLost):
            reading.result()
    with pytest.raises(KvLost, match="not at work"):
        read(port, handle, into, ALL)
    port = UcxPort(into, nobody, HOST, 0, log)
    port.start()
    read(port, handle, into, ALL)
    port.stop()


async def test_a_closed_end_is_lost() -> None:
    """A transfer whose turn comes as its connection ends hears of it as of any other loss."""
    link = UcxLink(UcxContext(HOST))
    link.close()
    message = np.zeros(8, np.uint8)
    for operation in (link.send, link.receive):
        with pytest.raises(KvLost, match="closed"):
            operation(message, 1)


def test_guests_that_say_nonsense_are_shown_out(
    port: UcxPort, steady: Child, into: SharedPool
) -> None:
    """And those that know what they want are served meanwhile."""
    host, _, number = steady.handle([1]).addresses[0].removeprefix("ucx://").rpartition(":")
    words = (b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"GET / HTTP/1.1\r\n\r\n")
    guests = [socket.create_connection((host, int(number)), timeout=PATIENCE_S) for _ in words]
    for guest, word in zip(guests, words, strict=True):
        guest.send(word)
    read(port, steady.handle([1]), into, [0])
    for guest in guests:
        with guest:
            assert guest.recv(1) == b""


async def test_the_port_can_be_knocked_at(port: UcxPort) -> None:
    """Its loop goes round, until it is stopped."""
    await port.knock()
    await asyncio.to_thread(port.stop)
    with pytest.raises(KvLost):
        await port.knock()


def test_addresses_of_others_are_refused(into: SharedPool) -> None:
    """And so is a port that is taken: told at start, naming the setting."""
    with pytest.raises(ConfigError, match="no interface") as refused:
        UcxPort(into, nobody, "192.0.2.1", 0, log)
    assert refused.value.param == "worker.kv_ucx_host"
    with socket.create_server((HOST, 0)) as taken, pytest.raises(ConfigError) as refused:
        UcxPort(into, nobody, HOST, taken.getsockname()[1], log)
    assert refused.value.param == "worker.kv_ucx_port"


def wait_until(condition: object) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_name_of_memory_is_not_left_behind(steady: Child, into: SharedPool) -> None:
    """Shared memory of UCX is not used: nothing is added to /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    port = UcxPort(into, nobody, HOST, 0, log)
    port.start()
    read(port, steady.handle([secrets.randbelow(NUM_BLOCKS)]), into, [0])
    assert set(os.listdir("/dev/shm")) - before == set()
    port.stop()
