"""A client that says its requests directly, and queues them when nothing comes of that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from infra.bus import Bus, EmbeddedBroker, Limits, Msg, ensure_topology, peek, waiting_work
from pipeline.acceptance import accepted_of
from pipeline.client import MeshClient, new_request_id
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import BusUnavailable, InvalidRequest, QueueFull
from schemas.headers import MSG_ID, WorkHeaders
from schemas.requests import InferenceRequest
from schemas.tokens import Accepted, StreamError
from tests.conftest import Until
from tests.pipeline.rig import TRACE, batch, beat, claim, record, store, stream_end

MODEL = "tiny"
QUEUE = subjects.admission(MODEL)
DIRECT = subjects.direct(QUEUE)


def request() -> InferenceRequest:
    return InferenceRequest(request_id=new_request_id(), model=MODEL, prompt="The sea")


@asynccontextmanager
async def direct_client(connect: Any) -> AsyncIterator[MeshClient]:
    bus = await connect("bridge")
    async with MeshClient(bus, "bridge", "b-1", is_direct=True) as client:
        yield client


class Door:
    """A control process that hears what is said directly, and answers if it ``answers``."""

    def __init__(self, bus: Bus, *, answers: bool = True) -> None:
        self.heard: list[Msg] = []
        self._bus = bus
        self._answers = answers

    async def open(self) -> Door:
        await self._bus.subscribe(DIRECT, self._hear)
        return self

    def _hear(self, message: Msg) -> None:
        self.heard.append(message)
        if self._answers:
            self._bus.say(message.reply, encode(self.word(message)))

    @staticmethod
    def word(message: Msg) -> Accepted:
        asked = decode(message.data, InferenceRequest)
        assert asked.reader is not None
        return accepted_of(record(asked.request_id, reader=asked.reader))


async def say_all(bus: Bus, stream: TokenStream) -> None:
    """What a worker writes of a request of one token."""
    chain = subjects.chain(stream.reader, stream.request_id)
    await store(bus, chain, claim(stream.request_id, "w1"))
    tokens = subjects.token_stream(stream.reader)
    await store(bus, tokens, batch(stream.request_id, 1, 0, 7))
    await store(bus, chain, stream_end(stream.request_id, 1, 1))


async def queued(bus: Bus) -> list[str]:
    """The requests that lie in the admission queue."""
    return [decode(message.data, InferenceRequest).request_id async for message in peek(bus, QUEUE)]


async def until_queued(bus: Bus, *request_ids: str) -> None:
    while await queued(bus) != list(request_ids):
        pass


async def test_an_answer_accepts_it_and_nothing_is_stored(bus: Bus, connect: Any) -> None:
    """Its word comes as the answer, its tokens by the stream; the queue never sees it."""
    door = await Door(bus).open()
    async with direct_client(connect) as client:
        stream = await client.submit(request(), traceparent=TRACE)
        word = await stream.accepted()
        await say_all(bus, stream)
        assert [delta.ids async for delta in stream] == [(7,)]
        assert client.num_open == 0
    (message,) = door.heard
    headers = WorkHeaders.from_dict(message.headers)
    assert (headers.request_id, headers.traceparent) == (stream.request_id, TRACE)
    assert word == door.word(message)
    assert await waiting_work(bus) == {}


async def test_while_few_are_open_a_request_leaves_at_once(
    bus: Bus, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with all that is said in this turn of the loop: with many open, it does."""
    await Door(bus).open()
    async with direct_client(connect) as client:
        await client.submit(request())
        assert not client.bus._client._pending
        monkeypatch.setattr("pipeline.client._FEW_OPEN", 1)
        await client.submit(request())
        assert len(client.bus._client._pending) == 1


async def test_without_anybody_who_hears_it_it_is_queued_at_once(bus: Bus, connect: Any) -> None:
    """The broker says that nobody listens. Those after it are queued without asking."""
    async with direct_client(connect) as client:
        first, second = request(), request()
        await client.submit(first)
        await until_queued(bus, first.request_id)
        await client.submit(second)
        assert await queued(bus) == [first.request_id, second.request_id]
    stored, _ = [message async for message in peek(bus, QUEUE)]
    assert stored.headers[MSG_ID] == f"{first.request_id}.admission"


async def test_without_an_answer_it_is_queued(
    bus: Bus, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever heard it is frozen, or died with it."""
    monkeypatch.setattr("pipeline.submitting.ANSWER_S", 0.0)
    await Door(bus, answers=False).open()
    async with direct_client(connect) as client:
        asked = request()
        await client.submit(asked)
        await until_queued(bus, asked.request_id)


async def test_what_a_lost_control_process_may_have_heard_is_queued_at_once(
    bus: Bus, connect: Any, until: Until
) -> None:
    """Whoever sees it die says so; what was answered is another's."""
    door = await Door(bus, answers=False).open()
    async with direct_client(connect) as client:
        asked = request()
        await client.submit(asked)
        await until(lambda: door.heard)
        gone = msgspec.structs.replace(beat("", state="gone"), kind="control", worker="")
        while not await queued(bus):
            await bus.publish(subjects.beat("control-1"), encode(gone))
        assert await queued(bus) == [asked.request_id]


async def test_one_that_nobody_claims_is_queued(
    bus: Bus, connect: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted, and whoever did that died before a worker had it: nothing was promised,
    and nothing is lost. It is durable from then on."""
    monkeypatch.setattr("pipeline.submitting.OPEN_S", 0.0)
    await Door(bus).open()
    async with direct_client(connect) as client:
        asked = request()
        stream = await client.submit(asked)
        assert not stream.is_durable
        await stream.accepted()
        await until_queued(bus, asked.request_id)
        await until(lambda: stream.is_durable)
        await say_all(bus, stream)
        assert [delta.ids async for delta in stream] == [(7,)]


async def test_one_that_is_heard_of_is_not_queued(
    bus: Bus, connect: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim, an end or a word in the stream: the mesh has it."""
    door = await Door(bus, answers=False).open()
    async with direct_client(connect) as client:
        claimed, accepted, refused = [await client.submit(request()) for _ in range(3)]
        await until(lambda: len(door.heard) == 3)
        words = {word.request_id: word for word in map(door.word, door.heard)}
        chain_of = subjects.chain
        await store(
            bus, chain_of(client.reader, claimed.request_id), claim(claimed.request_id, "w1")
        )
        await store(bus, subjects.token_stream(client.reader), words[accepted.request_id])
        error = InvalidRequest("no").info
        entry = StreamError(request_id=refused.request_id, epoch=0, error=error)
        await store(bus, chain_of(client.reader, refused.request_id), entry)
        await accepted.accepted()
        with pytest.raises(InvalidRequest):
            await refused.accepted()
        await until(lambda: claimed.view.claim)
        assert claimed.is_durable
        monkeypatch.setattr("pipeline.submitting.ANSWER_S", 0.0)
        last = request()  # the only one of which nothing was heard
        await client.submit(last)
        await until_queued(bus, last.request_id)


async def test_one_that_is_left_is_not_queued(
    bus: Bus, connect: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is gone: nobody waits for it."""
    door = await Door(bus, answers=False).open()
    async with direct_client(connect) as client:
        left = await client.submit(request())
        await until(lambda: door.heard)
        await left.aclose()
        monkeypatch.setattr("pipeline.submitting.ANSWER_S", 0.0)
        last = request()
        await client.submit(last)
        await until_queued(bus, last.request_id)


async def test_after_an_answer_requests_are_said_again(
    bus: Bus, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nobody answers one is tried now and then; with its answer the rest is over."""
    monkeypatch.setattr("pipeline.submitting.REST_S", 0.0)
    async with direct_client(connect) as client:
        first = request()
        await client.submit(first)
        await until_queued(bus, first.request_id)
        door = await Door(bus).open()
        await (await client.submit(request())).accepted()
        monkeypatch.setattr("pipeline.submitting.REST_S", 1e9)
        for _ in range(2):
            await (await client.submit(request())).accepted()
    assert len(door.heard) == 3


async def test_a_full_queue_is_told_to_who_waits(bus: Bus, connect: Any) -> None:
    """Said directly to nobody, and no room in the queue: a 429, as without the direct way."""
    await ensure_topology(bus, Limits(queue_msgs=1))
    async with direct_client(connect) as client:
        streams = [await client.submit(request()) for _ in range(2)]
        await until_queued(bus, streams[0].request_id)
        with pytest.raises(QueueFull):
            await streams[1].accepted()


async def test_a_broker_that_is_away_is_told(
    bus: Bus, connect: Any, broker: EmbeddedBroker, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was said when it broke is not known to be heard; new ones fail at once."""
    monkeypatch.setattr("pipeline.submitting._OUTAGE_S", 0.0)
    door = await Door(bus, answers=False).open()
    async with direct_client(connect) as client:
        stream = await client.submit(request())
        await until(lambda: door.heard)
        await broker.kill()
        with pytest.raises(BusUnavailable):
            await stream.accepted()
        with pytest.raises(BusUnavailable):
            await client.submit(request())
        await broker.restart()


async def test_an_outage_is_waited_out(
    bus: Bus, connect: Any, broker: EmbeddedBroker, until: Until
) -> None:
    """What was said before it is queued when the broker is back; what was left meanwhile is not."""
    door = await Door(bus, answers=False).open()
    async with direct_client(connect) as client:
        first, second = request(), request()
        stays, leaves = await client.submit(first), await client.submit(second)
        await until(lambda: len(door.heard) == 2)
        await broker.kill()
        await until(lambda: not client.bus.is_connected)
        leaves.leave()
        await broker.restart()
        await until(lambda: bus.is_connected, 10)
        await until_queued(bus, first.request_id)
        await say_all(bus, stays)
        assert [delta.ids async for delta in stays] == [(7,)]


async def test_a_word_that_can_not_be_read_is_no_answer(bus: Bus, connect: Any) -> None:
    """A newer peer's: by way of the queue it will be told in the stream."""
    await bus.subscribe(DIRECT, lambda message: bus.say(message.reply, b"\x81\xa1t\xa1?"))
    async with direct_client(connect) as client:
        asked = request()
        await client.submit(asked)
        await until_queued(bus, asked.request_id)


async def test_a_record_stands_for_a_word_that_was_an_answer(bus: Bus, connect: Any) -> None:
    """Who resumes a request that was accepted directly finds no word of that in the stream."""
    await Door(bus).open()
    async with direct_client(connect) as client:
        stream = await client.submit(request())
        await stream.accepted()
        await say_all(bus, stream)
        kept = record(stream.request_id, reader=stream.reader)
        kept = msgspec.structs.replace(kept, is_direct=True)
        async with client.resume(
            stream.request_id, reader=stream.reader, start_seq=1, record=kept
        ) as again:
            assert await again.accepted() == accepted_of(kept)
            assert [delta.ids async for delta in again] == [(7,)]
