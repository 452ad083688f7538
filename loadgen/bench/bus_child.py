"""The other processes of ``mesh bench bus``: one hears what the bench sends, others write and read
token batches.

    python -m loadgen.bench.bus_child   # one order on standard input, figures on standard output
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence

import msgspec

from infra.bus import Bus, StreamReader, TokenWriter, WorkMessage, WorkPull, admission_consumer
from infra.task_scope import task_scope
from loadgen.loop import fast_loop
from schemas import subjects
from schemas.codec import encode
from schemas.errors import BusUnavailable, SchemaError
from schemas.tokens import TokenBatch, TokenDelta, decode_stream_message

CORE_SUBJECT = f"{subjects.ROOT}.bench.hop"
STAMP_BYTES = 8  # CLOCK_MONOTONIC of the sender, little-endian nanoseconds
_FLUSH_EVERY = 16  # steps between two confirmations waited for: bounds what is under way
_FLUSH_S = 30.0


class HearOrder(msgspec.Struct, frozen=True, kw_only=True, tag="hear"):
    """Hear messages over all ways until standard input ends; each is answered with one byte over
    TCP, so that the next is sent when this one was heard."""

    nats_url: str


class WriteOrder(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    """Write token batches for ``readers``, each of ``num_streams`` tokens, ``num_steps`` times."""

    nats_url: str
    worker: str
    readers: tuple[str, ...]
    num_streams: int
    num_steps: int


class ReadOrder(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Read ``num_tokens`` of ``reader``."""

    nats_url: str
    reader: str
    num_tokens: int


Order = HearOrder | WriteOrder | ReadOrder


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says last: the CPU time of its work, without its start."""

    cpu_s: float = 0.0
    num_tokens: int = 0
    latencies_ms: Sequence[float] = ()


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says when it hears; ``port`` is that of the direct way."""

    port: int = 0


class _Hearing:
    """Notes how old each message is, and answers over the one TCP connection."""

    def __init__(self) -> None:
        self.latencies_ms: array[float] = array("d")
        self._answers: asyncio.StreamWriter | None = None

    def hear(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        sent_ns = int.from_bytes(data[:STAMP_BYTES], "little")
        self.latencies_ms.append((now_ns - sent_ns) / 1e6)
        assert self._answers is not None, "the sender connects first"
        self._answers.write(b"\0")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Messages of the direct way: four bytes of length, then the message."""
        self._answers = writer
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                self.hear(await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            return  # the sender is done
        finally:
            writer.close()


async def _hear(order: HearOrder) -> Done:
    hearing = _Hearing()
    server = await asyncio.start_server(hearing.serve, "127.0.0.1", 0, limit=1 << 24)
    async with await Bus.connect(order.nats_url, role="control", name="bench") as bus, server:
        await bus.subscribe(CORE_SUBJECT, lambda message: hearing.hear(message.data))
        acks: asyncio.Queue[WorkMessage] = asyncio.Queue(64)

        def take(message: WorkMessage) -> None:
            hearing.hear(message.data)
            acks.put_nowait(message)

        async def ack() -> None:
            while True:
                await (await acks.get()).ack()

        pull = WorkPull(bus, admission_consumer(bus.times), take, lambda: 32)
        async with task_scope() as tasks:
            tasks.create_task(pull.run())
            tasks.create_task(ack())
            _say(Ready(port=server.sockets[0].getsockname()[1]))
            await asyncio.to_thread(sys.stdin.buffer.read)
    return Done(latencies_ms=hearing.latencies_ms.tolist())


async def _write(order: WriteOrder) -> Done:
    async with await Bus.connect(order.nats_url, role="worker", name=order.worker) as bus:
        writer = TokenWriter(bus)
        async with task_scope() as tasks:
            tasks.create_task(writer.run())
            _say(Ready())
            await asyncio.to_thread(sys.stdin.buffer.readline)
            began_s = time.process_time()
            for number in range(order.num_steps):
                await _write_step(writer, order, number)
                if number % _FLUSH_EVERY == 0:
                    await writer.flush(_FLUSH_S)
            await writer.flush(_FLUSH_S)
            cpu_s = time.process_time() - began_s
    num_tokens = order.num_steps * order.num_streams * len(order.readers)
    return Done(cpu_s=cpu_s, num_tokens=num_tokens)


async def _write_step(writer: TokenWriter, order: WriteOrder, number: int) -> None:
    for reader in order.readers:
        deltas = tuple(
            TokenDelta(
                request_id=f"{order.worker}-{stream:024d}",
                epoch=2,
                number=number,
                ids=(1000 + number % 1000,),
                text=" hello",
            )
            for stream in range(order.num_streams)
        )
        batch = TokenBatch(worker=order.worker, deltas=deltas)
        await writer.until_room()
        await writer.put(subjects.token_stream(reader), encode(batch))


async def _read(order: ReadOrder) -> Done:
    num_tokens = 0
    complete = asyncio.Event()

    def deliver(_seq: int, _subject: str, data: bytes) -> None:
        nonlocal num_tokens
        message = decode_stream_message(data)
        if not isinstance(message, TokenBatch):
            raise SchemaError("not a token batch", param="$")
        num_tokens += len(message.deltas)
        if num_tokens >= order.num_tokens:
            complete.set()

    async with await Bus.connect(order.nats_url, role="bridge", name=order.reader) as bus:
        reader = StreamReader(bus, subjects.reader_filter(order.reader), deliver)
        await reader.start()
        async with task_scope() as tasks:
            tasks.create_task(reader.run())
            _say(Ready())
            await asyncio.to_thread(sys.stdin.buffer.readline)
            began_s = time.process_time()
            try:
                async with asyncio.timeout(_FLUSH_S * 4):
                    await complete.wait()
            except TimeoutError:
                raise BusUnavailable(f"{num_tokens} of {order.num_tokens} tokens came") from None
            cpu_s = time.process_time() - began_s
    return Done(cpu_s=cpu_s, num_tokens=num_tokens)


_figures = sys.stdout.buffer


def _say(what: msgspec.Struct) -> None:
    _figures.write(msgspec.json.encode(what) + b"\n")
    _figures.flush()


async def _carry_out(order: Order) -> Done:
    if isinstance(order, HearOrder):
        return await _hear(order)
    return await (_write(order) if isinstance(order, WriteOrder) else _read(order))


def main() -> None:
    """Carry out the order on standard input's first line."""
    sys.stdout = sys.stderr  # log lines
    order: Order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        _say(runner.run(_carry_out(order)))


if __name__ == "__main__":
    main()
