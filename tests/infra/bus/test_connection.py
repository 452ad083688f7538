import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time

import pytest

from infra.bus import (
    TOKENS,
    Bus,
    BusForbidden,
    NobodyListens,
    Stored,
    WrongLastSequence,
    ensure_topology,
)
from infra.bus.connection import header_bytes
from infra.bus.errors import from_answer
from infra.times import Times
from schemas import subjects
from schemas.errors import BusUnavailable, PayloadTooLarge, QueueFull, SchemaError
from tests.freezing import freeze

RECORD = subjects.request_record("request-1")
CHAIN = subjects.chain("bridge.b", "request-1")


async def test_a_stored_publish_answers_with_its_place(bus):
    """The answer is the stream's sequence, and the message is found there."""
    stored = await bus.publish_stored(RECORD, b"record", {"A": "b"})
    found = await bus.last_message(TOKENS, RECORD)
    assert found is not None
    assert (found.seq, found.subject, found.data) == (stored.seq, RECORD, b"record")
    assert found.headers == {"A": "b"}
    assert abs(found.unix_ms - bus.now_unix_ms()) < 1000
    assert await bus.last_message(TOKENS, subjects.request_record("request-2")) is None


async def test_a_message_id_is_stored_once(bus):
    """A repeat under the same message id answers with the first one's place."""
    first = await bus.publish_stored(RECORD, b"1", msg_id="m")
    assert await bus.publish_stored(RECORD, b"1", msg_id="m") == Stored(
        seq=first.seq, duplicate=True
    )


async def test_of_two_compare_and_sets_one_wins(connect, bus):
    """Two processes that saw the same last entry: one is stored, the other is told."""
    other = await connect("control")
    results = await asyncio.gather(
        bus.publish_stored(RECORD, b"a", expect_last_subject_seq=0),
        other.publish_stored(RECORD, b"b", expect_last_subject_seq=0),
        return_exceptions=True,
    )
    assert {type(result) for result in results} == {Stored, WrongLastSequence}


async def test_a_compare_and_set_survives_a_lost_answer(bus):
    """A repeat whose first attempt was stored and never answered finds its own entry: it won."""
    first = await bus.publish_stored(RECORD, b"a", msg_id="claim", expect_last_subject_seq=0)
    again = await bus._until_stored(  # as after an attempt whose answer was lost
        RECORD,
        b"a",
        {"Nats-Msg-Id": "claim", "Nats-Expected-Last-Subject-Sequence": "0"},
        1.0,
        is_repeat=True,
    )
    assert again == Stored(seq=first.seq, duplicate=True)
    with pytest.raises(WrongLastSequence):
        await bus.publish_stored(RECORD, b"b", msg_id="other", expect_last_subject_seq=0)


async def test_a_lost_compare_and_set_says_what_stands_there(bus):
    """The sequence of the message that was first; a reader may wait until it can be read."""
    first = await bus.publish_stored(RECORD, b"a")
    with pytest.raises(WrongLastSequence) as caught:
        await bus.publish_stored(RECORD, b"b", expect_last_subject_seq=0)
    assert caught.value.last_seq == first.seq
    found = await bus.last_message(TOKENS, RECORD, at_least_seq=first.seq)
    assert found.data == b"a"


async def test_a_reader_waits_for_what_is_known_to_be_stored(bus, until):
    """A server of a cluster that answers a moment late is asked again, not believed."""
    first = await bus.publish_stored(RECORD, b"old")
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(bus.last_message(TOKENS, RECORD, at_least_seq=first.seq + 1))
        await asyncio.sleep(0.1)
        assert not reading.done()
        await bus.publish_stored(RECORD, b"new")
    assert reading.result().data == b"new"


def test_a_cluster_without_a_leader_is_away_and_refuses_nothing():
    """Whoever waits out an outage waits this one out, too."""
    said = {"code": 503, "err_code": 10008, "description": "temporarily unavailable"}
    assert isinstance(from_answer(said, "CONSUMER.CREATE"), BusUnavailable)
    gone = from_answer({"code": 404, "err_code": 10014, "description": "consumer not found"}, "")
    assert not isinstance(gone, BusUnavailable)


async def test_messages_in_a_row_are_stored_in_order_each_by_its_own_condition(bus, recwarn):
    """One that comes too late harms no other; one that can't be sent is told, and the first is
    stored all the same."""
    first, second = await bus.publish_row(((RECORD, b"a", 0), (CHAIN, b"b", 0)))
    assert (first.seq + 1, second.duplicate) == (second.seq, False)
    late, next_one = await bus.publish_row(((RECORD, b"c", 0), (CHAIN, b"d", second.seq)))
    assert isinstance(late, WrongLastSequence)
    assert late.last_seq == first.seq
    assert next_one.seq == second.seq + 1
    too_large = bytes(bus.max_payload + 1)
    with pytest.raises(PayloadTooLarge):
        await bus.publish_row(((RECORD, b"e", first.seq), (CHAIN, too_large, next_one.seq)))
    assert (await bus.last_message(TOKENS, RECORD, at_least_seq=next_one.seq + 1)).data == b"e"
    assert (await bus.last_message(TOKENS, CHAIN)).seq == next_one.seq
    gc.collect()
    assert not recwarn.list


async def test_a_row_fails_with_its_connection(broker, bus, until):
    """What is not known to be stored is said so."""
    freeze(broker.pid)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(_outcome(bus.publish_row(((RECORD, b"a", 0), (CHAIN, b"b", 0)))))
        await until(lambda: len(bus._calls) >= 2)
        await broker.kill()
        async with asyncio.timeout(60):
            assert isinstance(await asked, BusUnavailable)
    assert not len(bus._calls)


@pytest.mark.parametrize("msg_id", [None, "once"])
async def test_another_message_in_flight_is_tried_again(bus, monkeypatch, msg_id):
    """On a replicated stream a compare-and-set may not be decided yet: that is no defeat, and
    nothing was stored that a repeat could find."""
    busy = from_answer({"code": 400, "err_code": 10164, "description": "in flight"}, RECORD)
    assert isinstance(busy, BusUnavailable)
    ask, answers = bus._ask, [busy, busy]

    async def answer(subject, *rest):
        if subject == RECORD and answers:
            raise answers.pop()
        return await ask(subject, *rest)

    monkeypatch.setattr(bus, "_ask", answer)
    stored = await bus.publish_stored(RECORD, b"a", msg_id=msg_id, expect_last_subject_seq=0)
    assert not stored.duplicate
    assert not answers


async def test_one_url_may_name_several_servers(broker, times):
    """With commas between; one that is away is passed over."""
    urls = f"nats://client:x@127.0.0.1:1,{broker.url('client')}"
    async with await Bus.connect(urls, role="client", times=times) as bus:
        assert bus.is_connected


async def test_full_queues_and_large_messages_have_their_own_errors(bus, times):
    """A full subject is QueueFull, a message over the limit PayloadTooLarge, at once."""
    from infra.bus import Limits

    await ensure_topology(bus, Limits(queue_msgs=2))
    subject = subjects.prefill("m@r", "w")
    for _ in range(2):
        await bus.publish_stored(subject, b"task")
    with pytest.raises(QueueFull):
        await bus.publish_stored(subject, b"task")
    with pytest.raises(PayloadTooLarge):
        await bus.publish_stored(RECORD, bytes(bus.max_payload + 1))
    with pytest.raises(SchemaError):
        await bus.publish("two words", b"")


async def test_headers_count_for_the_limit(bus, until):
    """A payload at the limit with headers does not fit; one byte under the sum does, and the
    connection lives (the broker closes it on a violation)."""
    headers = {"Mesh-A": "x" * 100}
    room = bus.max_payload - header_bytes(headers)
    assert bus.fits(bytes(room), headers)
    assert not bus.fits(bytes(room + 1), headers)
    await bus.publish_stored(RECORD, bytes(room), headers, timeout_s=10)
    with pytest.raises(PayloadTooLarge):
        await bus.publish(RECORD, bytes(room + 1), headers)
    assert bus.is_connected


async def test_nobody_listens_is_said_at_once(bus):
    """A question that nobody can answer does not wait for its time-out."""
    started = time.monotonic()
    with pytest.raises(NobodyListens):
        await bus.request("mesh.v1.nowhere", timeout_s=60)
    assert time.monotonic() - started < 30


async def test_the_first_connection_says_where_and_why(broker, times):
    """Unreachable and refused are told apart, and the password is in neither."""
    quick = Times(connect_timeout_s=0.3)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(BusUnavailable, match=rf"127\.0\.0\.1:{port}: not reachable"):
            await Bus.connect(f"nats://u:secret@127.0.0.1:{port}", role="u", times=quick)
    started = time.monotonic()
    with pytest.raises(BusUnavailable, match="wrong user or password") as refused:
        await Bus.connect(f"nats://worker:secret@127.0.0.1:{broker.port}", role="worker")
    assert time.monotonic() - started < 30
    assert "secret" not in str(refused.value)


async def test_a_silent_server_is_not_waited_for(times):
    """A port that accepts and says nothing ends the first connect in its time."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(BusUnavailable):
            await Bus.connect(
                f"nats://127.0.0.1:{silent.getsockname()[1]}",
                role="u",
                times=Times(connect_timeout_s=0.3),
            )


async def test_away_fails_at_once_and_nothing_is_said_later(broker, bus, until):
    """While the broker is away publishing fails at once, and what failed never arrives."""
    broken, back = [], []
    bus.on_disconnected.append(lambda: broken.append(1))
    bus.on_reconnected.append(lambda: back.append(1))
    await broker.kill()
    await until(lambda: broken)
    started = time.monotonic()
    with pytest.raises(BusUnavailable):
        await bus.publish(RECORD, b"lost")
    with pytest.raises(BusUnavailable):
        await bus.publish_stored(RECORD, b"lost", msg_id="m")
    assert time.monotonic() - started < 2.0
    await broker.restart()
    await until(lambda: back)
    assert await bus.last_message(TOKENS, RECORD) is None
    stored = await bus.publish_stored(RECORD, b"heard")
    assert stored.seq == 1


async def test_a_publish_with_an_id_goes_through_an_outage(broker, bus):
    """``through_outage`` waits for the broker and stores the message once."""
    await broker.kill()
    async with asyncio.TaskGroup() as tasks:
        write = tasks.create_task(
            bus.publish_stored(RECORD, b"x", msg_id="m", through_outage=True, timeout_s=10)
        )
        tasks.create_task(broker.restart())
    assert write.result() == Stored(seq=1)


async def test_an_open_question_ends_with_the_connection(broker, bus, until):
    """A question in flight when the broker dies fails then, not at its time-out."""
    await bus.subscribe("mesh.v1.deaf", lambda message: None)
    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(_outcome(bus.request("mesh.v1.deaf", timeout_s=60)))
        await until(lambda: len(bus._calls))
        await broker.kill()
        async with asyncio.timeout(60):
            assert isinstance(await asked, BusUnavailable)


DIES_WHEN_WRITTEN = """
import asyncio, os, signal, sys, uvloop
from infra.bus import Bus

async def main():
    async with await Bus.connect(sys.argv[1], role="worker") as bus:
        await bus.publish_row(
            [(subject, b"x" * 4096, 0) for subject in sys.argv[3:]],
            lambda: os.kill(os.getpid(), signal.SIGKILL),
        )

asyncio.Runner(loop_factory=uvloop.new_event_loop if sys.argv[2] == "uvloop" else None).run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_what_is_written_is_stored_though_its_process_is_killed(broker, bus, loop):
    """The kernel has it; who dies at the very moment when it is told has said it all."""
    row = (RECORD, CHAIN)
    url = broker.url("worker")
    script = [sys.executable, "-c", DIES_WHEN_WRITTEN, url, loop, *row]
    process = await asyncio.create_subprocess_exec(*script)
    async with asyncio.timeout(60):
        assert await process.wait() == -signal.SIGKILL
    for subject in row:
        async with asyncio.timeout(60):
            while await bus.last_message(TOKENS, subject) is None:
                await asyncio.sleep(0.01)


async def test_what_can_not_be_written_at_once_is_never_told(broker, bus, until):
    """The broker reads nothing, and the socket is full: it may all be lost with this process."""
    written, broken = [], []
    bus.on_disconnected.append(lambda: broken.append(1))
    freeze(broker.pid)
    try:
        for _ in range(3):
            bus.say(RECORD, bytes(bus.max_payload - 1000))
            await asyncio.sleep(0)
        with pytest.raises(BusUnavailable):
            await bus.publish_row([(CHAIN, b"", 0)], lambda: written.append(1))
        assert not written
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    await until(lambda: not broken or bus.is_connected, timeout_s=60)
    await asyncio.sleep(0.1)
    assert not written
    async with asyncio.timeout(60):
        while not written:  # what was said before is still on its way, or the connection is new
            with contextlib.suppress(BusUnavailable):
                await bus.publish_row([(CHAIN, b"", 0)], lambda: written.append(2))
    assert set(written) == {2}


@pytest.mark.slow
async def test_a_frozen_broker_is_noticed_and_left(broker, bus, until):
    """With unsent bytes in the socket, too, the connection is given up within 4 s and back
    after the thaw."""
    broken, back = [], []
    bus.on_disconnected.append(lambda: broken.append(1))
    bus.on_reconnected.append(lambda: back.append(1))
    freeze(broker.pid)
    started = time.monotonic()
    with pytest.raises(BusUnavailable):
        await _publish_for_ever(bus)
    await until(lambda: broken, timeout_s=60)
    assert time.monotonic() - started < 30
    os.kill(broker.pid, signal.SIGCONT)
    await until(lambda: back, timeout_s=60)
    await bus.publish_stored(RECORD, b"x", timeout_s=5)


async def test_a_late_pong_does_no_harm(broker, bus, until):
    """A round trip given up while the broker is frozen: its pong, when it comes, is dropped and
    the connection lives on."""
    broken = []
    bus.on_disconnected.append(lambda: broken.append(1))
    freeze(broker.pid)
    await bus.subscribe("mesh.v1.x", lambda message: None)  # gives up its round trip
    os.kill(broker.pid, signal.SIGCONT)
    heard = []
    await bus.subscribe("mesh.v1.y", lambda message: heard.append(message.data))
    await bus.publish("mesh.v1.y", b"1")
    await until(lambda: heard)
    assert not broken


async def test_subscriptions_come_back_with_the_broker(broker, bus, connect, until):
    """A subscription made before an outage hears what is said after it."""
    heard = []
    await bus.subscribe("mesh.v1.beat.*", lambda message: heard.append(message.data))
    other = await connect("worker")
    await broker.restart()
    assert await other.until_connected(5)
    assert await bus.until_connected(5)
    await bus.subscribe("mesh.v1.x", lambda message: None)  # a round trip: our side is back
    await other.publish("mesh.v1.beat.p", b"beat")
    await until(lambda: heard == [b"beat"])


async def test_a_forbidden_subject_is_an_error_and_not_a_time_out(connect, bus):
    """What the broker's permissions refuse is said at once, for each kind of call."""
    worker = await connect("worker")
    started = time.monotonic()
    with pytest.raises(BusForbidden):
        await worker.publish_stored(subjects.admission("Model"), b"", msg_id="m", timeout_s=60)
    with pytest.raises(BusForbidden):
        await worker.subscribe("mesh.v1.admission.>", lambda message: None)
    with pytest.raises(BusForbidden):
        await worker.api("STREAM.DELETE.MESH_WORK")
    assert time.monotonic() - started < 30


async def test_a_callback_that_raises_is_reported(bus, until):
    """The subscription lives on, and ``on_error`` hears the exception."""
    errors, heard = [], []
    bus.on_error.append(errors.append)

    def callback(message):
        heard.append(message.data)
        raise ValueError("boom")

    await bus.subscribe("mesh.v1.x", callback)
    await bus.publish("mesh.v1.x", b"1")
    await bus.publish("mesh.v1.x", b"2")
    await until(lambda: len(heard) == 2 and len(errors) == 2)


def test_it_works_under_uvloop(tmp_path):
    """The same under the other event loop: connect, store, lose the broker, come back."""
    uvloop = pytest.importorskip("uvloop")
    from infra.bus import EmbeddedBroker

    async def scenario():
        async with EmbeddedBroker(tmp_path / "b") as broker:
            async with await Bus.connect(broker.url("control"), role="control") as bus:
                await ensure_topology(bus)
                await bus.publish_stored(RECORD, b"1")
                await broker.restart()
                stored = await bus.publish_stored(
                    RECORD, b"2", msg_id="2", through_outage=True, timeout_s=10
                )
                assert stored.seq == 2

    uvloop.run(scenario())


async def _publish_for_ever(bus):
    while True:
        await bus.publish(subjects.token_stream("bridge.x"), bytes(100_000))
        await asyncio.sleep(0)


async def _outcome(awaitable):
    try:
        return await awaitable
    except Exception as error:
        return error
