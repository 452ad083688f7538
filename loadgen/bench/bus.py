"""``mesh bench bus``: what the bus costs.

One hop, from the call that sends until the receiver in another process has the message: over the
JetStream work queue, as tasks travel (stored, pulled, acknowledged); over core NATS, as heartbeats
do; and over a TCP connection between the two, as a mesh without a broker would. One message at a
time. Then token batches: several workers feed several bridges, as fast as the stream confirms.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

import msgspec
import numpy as np
import typer

from infra.bus import Bus, EmbeddedBroker, ensure_topology
from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.bus_child import (
    CORE_SUBJECT,
    STAMP_BYTES,
    Done,
    HearOrder,
    Order,
    ReadOrder,
    Ready,
    WriteOrder,
)
from loadgen.bench.processes import ProcessGroup
from loadgen.bench.result import BenchResult, Figure
from loadgen.loop import fast_loop
from loadgen.machine import MachineNote
from schemas import subjects
from schemas.errors import ConfigError, MeshError

SIZES = (1 << 10, 16 << 10, 128 << 10, 1 << 20)  # bytes; the broker's limit comes last
NUM_WRITERS, NUM_READERS = 8, 4
_STREAMS_PER_BATCH = 16  # 64 running sequences per worker, a fourth of them for each bridge
_HEADER_ROOM = 512  # the limit counts headers
_ANSWER_S = 30.0
_BULK_BYTES = 64 << 20  # of one size and way at most: large ones are sent less often

Send = Callable[[bytes], Awaitable[None]]


class ChildEnded(MeshError):
    """A process of the bench ended before its time."""

    code = "bench_child_ended"


def command(
    messages: Annotated[int, typer.Option(help="messages per size and way")] = 400,
    steps: Annotated[int, typer.Option(help="engine steps of each worker")] = 1500,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Time one hop over work queue, core NATS and TCP; and tokens from 8 workers to 4 bridges.

    It starts a broker of its own.
    """
    machine = MachineNote.now()
    try:
        for name, value in (("messages", messages), ("steps", steps)):
            if not 10 <= value <= 100_000:
                raise ConfigError(f"{name} is not within 10 and 100000", param=name)
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            figures = runner.run(measure(messages, steps))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench bus", ours)) from error
    BenchResult(
        bench="bus",
        figures=figures,
        settings={"messages": messages, "steps": steps, "streams_per_batch": _STREAMS_PER_BATCH},
        machine=machine,
        notes=(
            "hop: from the call that sends until another process has the message, in ms",
            "fan: every token stored and confirmed; CPU of workers, bridges and broker together",
        ),
    ).show(as_json=json)


async def measure(num_messages: int, num_steps: int) -> dict[str, Figure]:
    """All figures, on a broker of our own.

    Raises:
        ConfigError: no broker can be started here.
        ChildEnded: one of the other processes failed.
    """
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as folder:
        async with EmbeddedBroker(folder) as broker:
            async with await Bus.connect(broker.url("control"), role="control") as bus:
                await ensure_topology(bus)
                hops = await measure_hops(bus, broker, num_messages)
            return {**hops, "fan": await measure_fan(broker, num_steps)}


# -- one hop -------------------------------------------------------------------------------------


async def measure_hops(
    bus: Bus, broker: EmbeddedBroker, num_messages: int
) -> dict[str, dict[str, float]]:
    """Percentiles by way and size, such as ``work_queue_1024``."""
    sizes = [size for size in SIZES if size < bus.max_payload - _HEADER_ROOM]
    sizes.append(bus.max_payload - _HEADER_ROOM)
    async with _child(HearOrder(nats_url=broker.url("control"))) as child:
        reader, writer = await asyncio.open_connection("127.0.0.1", child.ready.port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = _ways(bus, writer)
        counts = []
        for size in sizes:
            count = min(num_messages, max(10, _BULK_BYTES // size))
            for name, send in ways.items():
                for _ in range(count):
                    async with asyncio.timeout(_ANSWER_S):
                        await _send_stamped(send, size)
                        await reader.readexactly(1)
                counts.append((f"{name}_{size}", count))
        writer.close()
        latencies_ms = (await child.done()).latencies_ms
    return _by_name(counts, latencies_ms)


def _ways(bus: Bus, writer: asyncio.StreamWriter) -> dict[str, Send]:
    async def over_work_queue(data: bytes) -> None:
        await bus.publish_stored(subjects.admission("bench"), data)

    async def over_core(data: bytes) -> None:
        await bus.publish(CORE_SUBJECT, data)

    async def over_tcp(data: bytes) -> None:
        writer.writelines((len(data).to_bytes(4, "little"), data))
        await writer.drain()

    return {"work_queue": over_work_queue, "core": over_core, "tcp": over_tcp}


async def _send_stamped(send: Send, size: int) -> None:
    rest = bytes(size - STAMP_BYTES)
    await send(time.monotonic_ns().to_bytes(STAMP_BYTES, "little") + rest)


def _by_name(
    counts: Sequence[tuple[str, int]], latencies_ms: Sequence[float]
) -> dict[str, dict[str, float]]:
    """The first tenth of each is left out: pools and buffers grow then."""
    found, start = {}, 0
    for name, count in counts:
        values = latencies_ms[start + count // 10 : start + count]
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        found[name] = {"p50": round(p50, 3), "p99": round(p99, 3)}
        start += count
    return found


# -- tokens --------------------------------------------------------------------------------------


async def measure_fan(broker: EmbeddedBroker, num_steps: int) -> dict[str, float]:
    """Tokens per second and CPU per token, from all workers to all bridges."""
    readers = tuple(subjects.bridge_reader(f"bench-{number}") for number in range(NUM_READERS))
    per_reader = NUM_WRITERS * num_steps * _STREAMS_PER_BATCH
    orders: list[Order] = [
        ReadOrder(nats_url=broker.url("bridge"), reader=reader, num_tokens=per_reader)
        for reader in readers
    ]
    orders += [
        WriteOrder(
            nats_url=broker.url("worker"),
            worker=f"bench-{number}",
            readers=readers,
            num_streams=_STREAMS_PER_BATCH,
            num_steps=num_steps,
        )
        for number in range(NUM_WRITERS)
    ]
    async with AsyncExitStack() as stack:
        children = [await stack.enter_async_context(_child(order)) for order in orders]
        processes = ProcessGroup({"broker": [broker.pid]})
        before_s, began_s = processes.cpu_s(), time.perf_counter()
        done = await asyncio.gather(*(child.done() for child in children))
        took_s, broker_s = time.perf_counter() - began_s, processes.since(before_s)["broker"]
    read, written = done[:NUM_READERS], done[NUM_READERS:]
    num_tokens = sum(one.num_tokens for one in read)
    cpu_us = {
        "workers": sum(one.cpu_s for one in written) / num_tokens * 1e6,
        "broker": broker_s / num_tokens * 1e6,
        "bridges": sum(one.cpu_s for one in read) / num_tokens * 1e6,
    }
    figures = {"tokens_s": num_tokens / took_s, "cpu_us_per_token": sum(cpu_us.values())}
    figures |= {f"{name}_us": value for name, value in cpu_us.items()}
    return {name: round(value, 2) for name, value in figures.items()}


# -- processes -----------------------------------------------------------------------------------


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, ready: Ready) -> None:
        self.ready = ready
        self._process = process

    async def done(self) -> Done:
        """Let it go on, or end, and hear what it has to say."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.close()
        return msgspec.json.decode(await _line(self._process), type=Done)


@asynccontextmanager
async def _child(order: Order) -> AsyncGenerator[_Child, None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "loadgen.bench.bus_child",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        yield _Child(process, msgspec.json.decode(await _line(process), type=Ready))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise ChildEnded("a process of the bench ended; it says above why")
    return line
