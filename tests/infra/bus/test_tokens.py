import asyncio
import contextlib
import os
import signal

import pytest

from infra.bus import TOKENS, StreamReader, TokenWriter, replay, stream_reader, token_writer
from schemas import subjects
from schemas.errors import BusUnavailable, PayloadTooLarge, QueueFull
from tests.freezing import freeze

READER = "bridge.b1"
STREAM = subjects.token_stream(READER)


class Listener:
    """Keeps what a reader delivers."""

    def __init__(self, bus, reader=READER):
        self.got = []
        self.reader = StreamReader(
            bus, subjects.reader_filter(reader), lambda *message: self.got.append(message)
        )

    @property
    def numbers(self):
        return [int(data) for _, _, data in self.got]

    @property
    def seqs(self):
        return [seq for seq, _, _ in self.got]


@contextlib.asynccontextmanager
async def running(*parts):
    """``run`` of writers and readers, as their owner would have them."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(part.run()) for part in parts]
        try:
            yield
        finally:
            for task in started:
                task.cancel()


async def _write(writer, numbers, subject=STREAM, pause_s=0.0):
    for number in numbers:
        await writer.put(subject, str(number).encode())
        await asyncio.sleep(pause_s)


async def _stored(bus, subject=STREAM):
    return [message async for message in replay(bus, TOKENS, subject)]


def _in_order_once(numbers):
    """The numbers as a reader of tokens takes them: each once, and none out of turn."""
    seen = 0
    for number in numbers:
        if number == seen:
            seen += 1
    return seen


# -- writer ------------------------------------------------------------------------------------


async def test_flush_means_stored(connect, bus, monkeypatch):
    """When flush returns, all batches are in the stream, in order; asked for and answered in
    time, they are there once each."""
    monkeypatch.setattr(token_writer, "_ANSWER_S", 60.0)  # this machine may be busy
    writer = TokenWriter(await connect("worker"))
    async with running(writer):
        await _write(writer, range(99))
        await writer.put(STREAM, b"99", ask=True)
        await writer.flush(60)
        assert writer.num_unconfirmed == 0
        assert [int(message.data) for message in await _stored(bus)] == list(range(100))
        await writer.flush(60)  # nothing to wait for


async def test_what_nobody_asks_for_is_confirmed_all_the_same(connect, bus, until):
    """A writer that falls silent has everything confirmed soon after."""
    writer = TokenWriter(await connect("worker"))
    async with running(writer):
        await _write(writer, range(7))
        await until(lambda: writer.num_unconfirmed == 0)
    assert _in_order_once(int(m.data) for m in await _stored(bus)) == 7


async def test_a_full_ring_pushes_back(broker, connect, bus, until):
    """With the broker away the ring fills and refuses; it empties when the broker is back."""
    connection = await connect("worker")
    writer = TokenWriter(connection, max_batches=5)
    async with running(writer):
        await broker.kill()
        await until(lambda: not connection.is_connected)
        await _write(writer, range(5))
        assert writer.is_full
        with pytest.raises(QueueFull):
            await writer.put(STREAM, b"5")
        with pytest.raises(BusUnavailable):
            await writer.flush(0.1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(broker.restart())
            tasks.create_task(writer.until_room())
        await writer.put(STREAM, b"5")
        await writer.flush(60)
    assert await bus.until_connected(5)
    assert _in_order_once(int(m.data) for m in await _stored(bus)) == 6


async def test_a_batch_that_can_never_be_sent_is_not_taken(connect, bus):
    """Too large for a message: refused, and the ring stays usable."""
    writer = TokenWriter(await connect("worker"))
    async with running(writer):
        with pytest.raises(PayloadTooLarge):
            await writer.put(STREAM, bytes(bus.max_payload + 1))
        await writer.put(STREAM, b"0")
        await writer.flush(60)


async def test_an_unanswered_question_keeps_later_answers_from_confirming(connect, bus):
    """Only an unbroken run of answers confirms: a lost head shows although the tail is stored."""
    writer = TokenWriter(await connect("worker"))
    for number in range(3):
        await writer.put(STREAM, str(number).encode(), ask=True)

    class Answer:
        data = b'{"stream": "MESH_TOKENS", "seq": 1}'

        def __init__(self, generation, number):
            self.subject = f"{writer._inbox}.{generation}.{number}"

    writer._hear(Answer(0, 2))
    assert writer.num_unconfirmed == 3
    writer._hear(Answer(7, 0))  # of another generation: says nothing
    assert writer.num_unconfirmed == 3
    writer._hear(Answer(0, 0))
    assert writer.num_unconfirmed == 2
    writer._hear(Answer(0, 1))
    assert writer.num_unconfirmed == 0


# -- reader ------------------------------------------------------------------------------------


async def test_an_answer_on_a_new_connection_says_nothing_of_the_old_one(
    broker, connect, bus, until
):
    """What went down with the old broker is written again before a later batch can be confirmed,
    also in the moment before the reconnect is told."""
    connection = await connect("worker")
    writer = TokenWriter(connection)
    async with running(writer):
        await writer.put(STREAM, b"0", ask=True)
        await writer.flush(60)
        told = connection.on_reconnected[:]
        connection.on_reconnected.clear()  # the moment before it is told, made long
        writer._sample_s = 1000.0  # nobody asks by the way
        freeze(broker.pid)
        await _write(writer, range(1, 4))  # into the socket of a broker that never reads them
        await broker.restart()
        await until(lambda: connection.num_reconnects == 1 and connection.is_connected)
        await writer.put(STREAM, b"4", ask=True)
        await writer.flush(60)
        connection.on_reconnected += told
    assert await bus.until_connected(5)
    assert _in_order_once(int(message.data) for message in await _stored(bus)) == 5


async def test_tokens_and_chains_come_in_one_order(connect, bus, until):
    """Two publishers on the reader's subjects: what arrives is the stream, from first to last."""
    listener = Listener(await connect("bridge"))
    await listener.reader.start()
    writer, chain = TokenWriter(await connect("worker")), subjects.chain(READER, "request-1")
    async with running(writer, listener.reader):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_write(writer, range(300)))
            tasks.create_task(_publish(bus, chain, 100))
        await writer.flush(60)
        stored = await _stored(bus, subjects.reader_filter(READER))
        await until(lambda: len(listener.got) >= len(stored))
    assert listener.got[: len(stored)] == [(m.seq, m.subject, m.data) for m in stored]
    assert listener.reader.num_fills == 1  # the start: nothing was lost on the way


async def test_a_late_start_reads_what_is_stored_and_goes_on(connect, bus, until):
    """From a sequence on: stored messages, then live ones, no gap and no repeat."""
    seqs = await _publish(bus, STREAM, 50)
    await _publish(bus, subjects.token_stream("bridge.other"), 5)
    listener = Listener(await connect("bridge"))
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(_publish(bus, STREAM, 50, first=50))
        await listener.reader.start(seqs[20])
        async with running(listener.reader):
            await writing
            await until(lambda: listener.numbers[-1:] == [99])
    assert listener.numbers == list(range(20, 100))
    assert listener.seqs == sorted(set(listener.seqs))


async def test_without_a_sequence_only_what_comes_is_read(connect, bus, until):
    """``start()`` begins at the stream's end."""
    await _publish(bus, STREAM, 5)
    listener = Listener(await connect("bridge"))
    await listener.reader.start()
    async with running(listener.reader):
        await _publish(bus, STREAM, 2, first=5)
        await until(lambda: listener.numbers == [5, 6])


async def test_a_hole_in_the_live_messages_is_filled_in_place(connect, bus, until):
    """A live message lost on the way is read from the stream before the next one is delivered."""
    listener = Listener(await connect("bridge"))
    await listener.reader.start()
    _lose(listener.reader, {b"3", b"4", b"7"})
    async with running(listener.reader):
        await _publish(bus, STREAM, 10)
        await until(lambda: len(listener.got) == 10)
    assert listener.numbers == list(range(10))
    assert listener.seqs == sorted(listener.seqs)


async def test_what_a_broken_connection_lost_is_not_behind_what_comes_first(connect, bus, until):
    """Over a new connection another subject goes on before the word of it: what was lost before
    that is read all the same."""
    connection = await connect("bridge")
    listener = Listener(connection)
    await listener.reader.start()
    _lose(listener.reader, {b"1", b"2"})
    async with running(listener.reader):
        await _publish(bus, STREAM, 1)
        await until(lambda: listener.numbers == [0])
    for callback in list(connection.on_disconnected):
        callback()
    await _publish(bus, STREAM, 2, first=1)
    await _publish(bus, subjects.chain(READER, "0" * 32), 1, first=3)
    await until(lambda: listener.reader._held or listener.numbers[-1] == 3)
    for callback in list(connection.on_reconnected):
        callback()
    async with running(listener.reader):
        await until(lambda: listener.numbers[-1] == 3)
    assert listener.numbers == [0, 1, 2, 3]


async def test_a_lost_tail_is_found_by_looking(connect, bus, until):
    """The last message lost: nothing follows that could show it, ``check`` does."""
    listener = Listener(await connect("bridge"))
    await listener.reader.start()
    _lose(listener.reader, {b"2"})
    async with running(listener.reader):
        await _publish(bus, STREAM, 3)
        await until(lambda: listener.numbers == [0, 1])
        listener.reader.check()
        await until(lambda: listener.numbers == [0, 1, 2] and not listener.reader.is_filling)
        listener.reader.check()
        await until(lambda: listener.reader.num_fills == 3)
    assert listener.numbers == [0, 1, 2]


async def test_more_during_a_fill_than_is_kept_loses_nothing(connect, bus, until, monkeypatch):
    """What comes live while the stream is read, and finds no place, is read from the stream."""
    monkeypatch.setattr(stream_reader, "_MAX_HELD_MSGS", 16)
    listener = Listener(await connect("bridge"))
    await listener.reader.start()
    overflows = []
    drop_held = listener.reader._drop_held
    monkeypatch.setattr(listener.reader, "_drop_held", lambda: (overflows.append(1), drop_held()))
    writer = TokenWriter(await connect("worker"))
    async with running(writer, listener.reader):
        while not overflows:
            listener.reader.check()
            await _write_at_once(writer, range(writer._next, writer._next + 500))
            await writer.flush(60)
        stored = await _stored(bus, subjects.reader_filter(READER))
        await until(lambda: listener.seqs and listener.seqs[-1] >= stored[-1].seq)
    assert listener.got[: len(stored)] == [(m.seq, m.subject, m.data) for m in stored]


async def test_the_broker_is_killed_in_mid_stream(broker, connect, bus, until):
    """SIGKILL and restart with a writer and a reader at work: every number arrives, the reader
    delivers the stream exactly, in order and once."""
    writer_bus, reader_bus = await connect("worker"), await connect("bridge")
    listener, writer = Listener(reader_bus), TokenWriter(writer_bus)
    await listener.reader.start()
    async with running(writer, listener.reader):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_write(writer, range(2000), pause_s=0.0005))
            await until(lambda: len(listener.got) > 300)
            await broker.restart()
            await until(lambda: len(listener.got) > 900, timeout_s=60)
            await broker.restart()
        await writer.flush(60)
        assert await bus.until_connected(5)
        stored = await _stored(bus, subjects.reader_filter(READER))
        await until(lambda: listener.seqs and listener.seqs[-1] >= stored[-1].seq)
    assert listener.got[: len(stored)] == [(m.seq, m.subject, m.data) for m in stored]
    assert _reordered(listener.numbers) == list(range(2000))


async def test_the_broker_is_frozen_in_mid_stream(broker, connect, bus, until):
    """SIGSTOP until the clients have noticed, then SIGCONT: nothing is missing."""
    writer_bus, reader_bus = await connect("worker"), await connect("bridge")
    listener, writer = Listener(reader_bus), TokenWriter(writer_bus)
    await listener.reader.start()
    async with running(writer, listener.reader):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_write(writer, range(3000), pause_s=0.001))
            await until(lambda: len(listener.got) > 200)
            freeze(broker.pid)
            await until(lambda: not (writer_bus.is_connected or reader_bus.is_connected), 8)
            os.kill(broker.pid, signal.SIGCONT)
        await writer.flush(60)
        assert await bus.until_connected(5)
        stored = await _stored(bus, subjects.reader_filter(READER))
        await until(lambda: listener.seqs and listener.seqs[-1] >= stored[-1].seq)
    assert listener.got[: len(stored)] == [(m.seq, m.subject, m.data) for m in stored]
    assert _reordered(listener.numbers) == list(range(3000))


async def test_a_closed_reader_leaves_nothing(connect, bus, until):
    """No callback, no subscription, no consumer."""
    connection = await connect("bridge")
    listener = Listener(connection)
    async with listener.reader:
        await listener.reader.start(1)
        await _publish(bus, STREAM, 1)
        await until(lambda: listener.got)
    await _publish(bus, STREAM, 1)
    await connection.last_message(TOKENS, STREAM)  # a round trip: it would have come
    assert len(listener.got) == 1
    assert connection.on_reconnected == connection.on_error == []
    assert (await bus.api(f"CONSUMER.NAMES.{TOKENS}"))["consumers"] == []


# -- replay ------------------------------------------------------------------------------------


async def test_replay_selects(bus):
    """From, until, several subjects, and only the last of each."""
    seqs = await _publish(bus, STREAM, 10)
    chains = [subjects.chain(READER, f"request-{i}") for i in range(3)]
    for chain in chains:
        await _publish(bus, chain, 2)
    numbers = [
        int(message.data)
        async for message in replay(bus, TOKENS, STREAM, start_seq=seqs[3], until_seq=seqs[6])
    ]
    assert numbers == [3, 4, 5]
    last = [m async for m in replay(bus, TOKENS, chains, last_per_subject=True)]
    assert [(m.subject, m.data) for m in last] == [(chain, b"1") for chain in chains]
    assert [m async for m in replay(bus, TOKENS, STREAM, start_seq=10_000)] == []
    every = [m async for m in replay(bus, TOKENS, [STREAM, *chains])]
    assert [m.seq for m in every] == sorted(m.seq for m in every)
    assert len(every) == 16
    assert (await bus.api(f"CONSUMER.NAMES.{TOKENS}"))["consumers"] == []


async def test_a_long_replay_is_whole(connect, bus):
    """42 MB, more than flow control lets be under way: all, in order."""
    writer = TokenWriter(await connect("worker"))
    payload = bytes(60_000)
    async with running(writer):
        for _ in range(700):
            await writer.put(STREAM, payload)
            await asyncio.sleep(0)
        await writer.flush(30)
    seqs = [message.seq async for message in replay(bus, TOKENS, STREAM)]
    assert len(seqs) >= 700
    assert seqs == sorted(set(seqs))


async def test_a_replay_that_is_left_early_deletes_its_consumer(bus):
    """``aclosing`` ends it at once."""
    await _publish(bus, STREAM, 10)
    async with contextlib.aclosing(replay(bus, TOKENS, STREAM)) as messages:
        async for _ in messages:
            break
    assert (await bus.api(f"CONSUMER.NAMES.{TOKENS}"))["consumers"] == []


async def test_a_replay_over_a_dying_broker_ends_with_an_error(broker, bus):
    """Never a shorter answer: the broker gone in the middle is BusUnavailable, and at once."""
    for _ in range(15):  # 60 MB, more than is under way at once
        await bus.publish_stored(STREAM, bytes(4_000_000))

    async def read():
        async for message in replay(bus, TOKENS, STREAM):
            if message.seq == 5:
                await broker.kill()

    async with asyncio.timeout(60):
        with pytest.raises(BusUnavailable):
            await read()


# -- helpers -----------------------------------------------------------------------------------


async def _publish(bus, subject, count, first=0):
    return [(await bus.publish_stored(subject, str(first + i).encode())).seq for i in range(count)]


async def _write_at_once(writer, numbers):
    for number in numbers:
        await writer.put(STREAM, str(number).encode())


def _lose(reader, lost):
    """Live messages with these payloads never reach ``reader``."""
    callbacks, receive = reader._bus._client._callbacks, reader._receive
    (number,) = (number for number, callback in callbacks.items() if callback == receive)
    callbacks[number] = lambda message: None if message.data in lost else receive(message)


def _reordered(numbers):
    """Each number once, in the order of numbers: what a token stream makes of what it reads."""
    return sorted(set(numbers))
