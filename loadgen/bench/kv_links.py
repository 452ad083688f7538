"""``mesh bench kv``, section links: how fast blocks come from another process to us.

From the handle to blocks that are copied and checked, 64 MiB of them: over shared memory beside a
plain memcpy, and over UCX beside a raw socket, both by turns in the same run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import msgspec
import numpy as np
import structlog

from infra.transport.handover import PoolReader
from infra.transport.reader import KvReader
from infra.transport.shm import SharedPool
from loadgen.bench.kv import KvPlan, KvSection
from loadgen.bench.kv_owner import HOST, Where
from loadgen.bench.result import Figure
from schemas.codec import pack_ids, unpack_ids
from schemas.errors import ConfigError
from schemas.kv import KvHandle

BLOCK_BYTES = 368_640  # of SmolLM2-135M in bf16: 16 tokens, 30 layers, 3 heads of 64, K and V
TOTAL_BYTES = 64 << 20
_NUM_BLOCKS = TOTAL_BYTES // BLOCK_BYTES
_NUM_SMALL = 50  # small transfers beside large ones
_PATIENCE_S = 60.0


def measure(plan: KvPlan) -> KvSection:
    """All of it.

    Raises:
        ConfigError: ucxx is not installed.
    """
    if find_spec("ucxx") is None:
        raise ConfigError("needs ucxx: pip install 'inference-mesh[ucx]'", param="only")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(UCX_TLS="tcp"))
        where = stack.enter_context(_owner())
        into = stack.enter_context(SharedPool(_NUM_BLOCKS, BLOCK_BYTES))
        reader = stack.enter_context(_reader(into))
        links = stack.enter_context(contextlib.closing(_Links(where, into, reader)))
        figures = {**_local(links, plan.turns), **_remote(links, plan.turns), **_beside(links)}
    return KvSection(
        figures=figures,
        notes=(
            f"links: {_NUM_BLOCKS} blocks of {BLOCK_BYTES} bytes, handle to checked blocks; "
            "memcpy and tcp: the same bytes, unchecked",
        ),
    )


class _Links:
    """Ways to bring the owner's blocks here."""

    def __init__(self, where: Where, into: SharedPool, reader: KvReader) -> None:
        self._where = where
        self._into = into
        self._reader = reader
        self._source = np.array(into.slots)  # the same size, in pages that are there
        self._raw = socket.create_connection((HOST, where.tcp_port), timeout=_PATIENCE_S)

    def shm(self) -> None:
        """All blocks over shared memory."""
        self._read(self._where.shm)

    def ucx(self) -> None:
        """All blocks over UCX."""
        self._read(self._where.ucx)

    def one_over_ucx(self) -> None:
        """A single block over UCX."""
        self._read(_first_block(self._where.ucx))

    def memcpy(self) -> None:
        """As many bytes from our own memory."""
        np.copyto(self._into.slots, self._source)

    def tcp(self) -> None:
        """As many bytes over a raw socket."""
        view, at = memoryview(self._into.slots.reshape(-1).data), 0
        self._raw.send(b"!")
        while at < len(view):
            at += self._raw.recv_into(view[at:])

    def close(self) -> None:
        """End the raw connection."""
        self._raw.close()

    def _read(self, handle: KvHandle) -> None:
        slots = range(len(unpack_ids(handle.blocks)))
        self._reader.read(handle, self._into, slots, time.monotonic() + _PATIENCE_S)


def _local(links: _Links, turns: int) -> dict[str, Figure]:
    shm_s, memcpy_s = _by_turns(links.shm, links.memcpy, turns)
    return {
        "shm_gb_s": _gb_s(shm_s),
        "memcpy_gb_s": _gb_s(memcpy_s),
        "shm_ratio": round(memcpy_s / shm_s, 3),
    }


def _remote(links: _Links, turns: int) -> dict[str, Figure]:
    ucx_s, tcp_s = _by_turns(links.ucx, links.tcp, turns)
    return {
        "ucx_gb_s": _gb_s(ucx_s),
        "tcp_gb_s": _gb_s(tcp_s),
        "ucx_ratio": round(tcp_s / ucx_s, 3),
    }


def _beside(links: _Links) -> dict[str, Figure]:
    """How long one block takes alone, and while large transfers run one after the other."""
    alone_ms = [1e3 * _seconds(links.one_over_ucx) for _ in range(_NUM_SMALL)]
    is_over = threading.Event()
    large_ms: list[float] = []

    def large() -> None:
        while not is_over.is_set():
            large_ms.append(1e3 * _seconds(links.ucx))

    thread = threading.Thread(target=large)
    thread.start()
    try:
        beside_ms = [1e3 * _seconds(links.one_over_ucx) for _ in range(_NUM_SMALL)]
    finally:
        is_over.set()
        thread.join()
    return {
        "ucx_small_ms": round(statistics.median(alone_ms), 3),
        "ucx_small_beside_ms": round(statistics.median(beside_ms), 3),
        "ucx_small_beside_max_ms": round(max(beside_ms), 3),
        "ucx_large_beside_ms": round(statistics.median(large_ms), 3),
    }


def _by_turns(
    ours: Callable[[], None], theirs: Callable[[], None], turns: int
) -> tuple[float, float]:
    """Medians in seconds; the first turn of each is for warming up."""
    ours()
    theirs()
    seconds = [(_seconds(ours), _seconds(theirs)) for _ in range(turns)]
    return statistics.median(s for s, _ in seconds), statistics.median(s for _, s in seconds)


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _gb_s(seconds: float) -> float:
    return round(_NUM_BLOCKS * BLOCK_BYTES / seconds / 1e9, 3)


def _first_block(handle: KvHandle) -> KvHandle:
    return msgspec.structs.replace(
        handle,
        blocks=pack_ids([0]),
        generations=handle.generations[:4],
        checksums=handle.checksums[:8],
    )


@contextlib.contextmanager
def _reader(into: SharedPool) -> Iterator[KvReader]:
    from infra.transport.ucx.port import UcxPort

    port = UcxPort(into, lambda lease_id, secret: False, HOST, 0, structlog.get_logger("bench"))
    port.start()
    reader = KvReader(PoolReader(), port)
    try:
        yield reader
    finally:
        port.stop()
        reader.close()


@contextlib.contextmanager
def _owner() -> Iterator[Where]:
    command = [sys.executable, "-m", "loadgen.bench.kv_owner", str(_NUM_BLOCKS), str(BLOCK_BYTES)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            yield msgspec.json.decode(process.stdout.readline(), type=Where)
            process.stdin.close()
            process.wait(_PATIENCE_S)
        finally:
            process.kill()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
