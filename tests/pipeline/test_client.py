"""The client against a real broker; the mesh behind it is played by hand, entry by entry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from infra.bus import (
    Bus,
    BusForbidden,
    EmbeddedBroker,
    Limits,
    ensure_topology,
    publish_work,
    waiting_work,
)
from infra.times import Times
from pipeline.claim_chain import ClaimChain
from pipeline.client import MeshClient, new_request_id
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.codec import decode
from schemas.control import CancelWord
from schemas.errors import (
    BusUnavailable,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestCancelled,
    SchemaError,
)
from schemas.headers import WorkHeaders
from schemas.requests import InferenceRequest
from schemas.tokens import (
    Accepted,
    Cancelled,
    ChainEntry,
    Expired,
    StreamError,
    TokenBatch,
    TokenDelta,
)
from tests.conftest import Until
from tests.pipeline.rig import TRACE, Ear, batch, claim, store, stream_end

SUBJECT = subjects.admission("tiny")


@dataclass(frozen=True, slots=True)
class TokenStreamName:
    """What the played mesh must know of a stream."""

    request_id: str
    reader: str
    deadline_unix_ms: int


Name = TokenStream | TokenStreamName


@dataclass(slots=True)
class Played:
    """The mesh of one test: what admission and workers would write."""

    bus: Bus
    ear: Ear
    broker: EmbeddedBroker
    times: Times

    @asynccontextmanager
    async def client(self, user: str = "client", **more: Any) -> AsyncIterator[MeshClient]:
        url = self.broker.url(user)
        async with MeshClient.connect(url, times=self.times, **more) as client:
            yield client

    async def accept(self, stream: Name, **facts: Any) -> Accepted:
        word = Accepted(
            request_id=stream.request_id,
            model="tiny",
            revision="r1",
            prompt_tokens=1,
            max_tokens=8,
            admitted_unix_ms=1,
            deadline_unix_ms=facts.pop("deadline_unix_ms", stream.deadline_unix_ms),
        )
        await store(self.bus, subjects.token_stream(stream.reader), word)
        return word

    async def say(self, stream: Name, epoch: int, number: int, *ids: int) -> None:
        tokens = subjects.token_stream(stream.reader)
        await store(self.bus, tokens, batch(stream.request_id, epoch, number, *ids))

    async def chain(self, stream: Name, entry: ChainEntry) -> int:
        return await store(self.bus, subjects.chain(stream.reader, stream.request_id), entry)

    async def answer(self, stream: TokenStream, *ids: int) -> None:
        """A whole answer, token by token."""
        await self.accept(stream)
        await self.chain(stream, claim(stream.request_id, "w1"))
        for number, token in enumerate(ids):
            await self.say(stream, 1, number, token)
        await self.chain(stream, stream_end(stream.request_id, 1, len(ids)))


@pytest_asyncio.fixture
async def mesh(bus: Bus, ear: Ear, broker: EmbeddedBroker, times: Times) -> Played:
    return Played(bus, ear, broker, times)


def request(**fields: Any) -> InferenceRequest:
    fields.setdefault("request_id", new_request_id())
    fields.setdefault("prompt", "Hi")
    return InferenceRequest(model="tiny", **fields)


async def ids_of(stream: TokenStream) -> list[int]:
    """All token ids to the end."""
    async with asyncio.timeout(60):
        return [token async for delta in stream for token in delta.ids]


# Submitting -----------------------------------------------------------------------------------


async def test_a_request_is_published_with_all_that_admission_needs(
    mesh: Played, until: Until
) -> None:
    """Reader and deadline are set, the headers say the same as the body, the trace goes along."""
    async with mesh.client("alice") as client:
        before = client.bus.now_unix_ms()
        asked = request(label="mine")
        stream = await client.submit(asked, traceparent=TRACE)
        assert stream.reader == client.reader
        assert client.reader.startswith("alice.")
        await until(lambda: mesh.ear.on(SUBJECT))
    (message,) = mesh.ear.on(SUBJECT)
    sent = decode(message.data, InferenceRequest)
    assert sent.deadline_unix_ms is not None
    assert 0 <= sent.deadline_unix_ms - before - mesh.times.default_deadline_s * 1000 < 5000
    deadline = sent.deadline_unix_ms
    assert sent == msgspec.structs.replace(asked, reader=client.reader, deadline_unix_ms=deadline)
    assert WorkHeaders.from_dict(message.headers) == WorkHeaders(
        schema="inference-request/1",
        request_id=asked.request_id,
        epoch=0,
        deadline_unix_ms=deadline,
        traceparent=TRACE,
    )


async def test_an_answer_is_read_to_its_end(mesh: Played) -> None:
    """Accepted, every token once and in order, then usage; nothing is kept afterwards."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        assert client.num_open == 1
        await mesh.answer(stream, 5, 6, 7)
        accepted = await stream.accepted()
        assert accepted.prompt_tokens == 1
        assert await ids_of(stream) == [5, 6, 7]
        assert stream.end is not None
        assert stream.end.usage.completion_tokens == 3
        assert await stream.next_deltas() == []  # and says so again
        assert client.num_open == 0


async def test_who_follows_has_each_token_once(mesh: Played) -> None:
    """What it takes is not read again; what it refuses is, in order, and is not offered again."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        taken: list[int] = []

        def take_two(deltas: Sequence[TokenDelta]) -> bool:
            if len(taken) >= 2:
                return False
            taken.extend(token for delta in deltas for token in delta.ids)
            return True

        stream.follow(take_two)
        await mesh.answer(stream, 5, 6, 7, 8, 9)
        rest = await ids_of(stream)
        assert taken[:1] == [5]
        assert taken + rest == [5, 6, 7, 8, 9]


async def test_a_follower_that_fails_ends_its_own_stream(mesh: Played) -> None:
    """Its reader hears of it, and the other streams of the client go on."""
    async with mesh.client() as client:
        stream, other = await client.submit(request()), await client.submit(request())

        def fail(deltas: Sequence[TokenDelta]) -> bool:
            raise ArithmeticError("a bug")

        stream.follow(fail)
        await mesh.answer(stream, 5, 6)
        await mesh.answer(other, 7, 8)
        assert await ids_of(other) == [7, 8]
        with pytest.raises(ArithmeticError):
            await stream.next_deltas()


async def test_streams_of_one_client_are_kept_apart(mesh: Played) -> None:
    """One batch may hold tokens of many requests; each goes to its own stream."""
    async with mesh.client() as client:
        streams = [await client.submit(request()) for _ in range(3)]
        for stream in streams:
            await mesh.accept(stream)
            await mesh.chain(stream, claim(stream.request_id, "w1"))
        for number in range(4):
            deltas = tuple(
                TokenDelta(request_id=s.request_id, epoch=1, number=number, ids=(10 * n + number,))
                for n, s in enumerate(streams)
            )
            one = TokenBatch(worker="w1", deltas=deltas)
            await store(mesh.bus, subjects.token_stream(client.reader), one)
        for n, stream in enumerate(streams):
            await mesh.chain(stream, stream_end(stream.request_id, 1, 4))
            assert await ids_of(stream) == [10 * n + number for number in range(4)]


async def test_only_what_counts_is_shown(mesh: Played) -> None:
    """Repeats, numbers out of order, what an old owner says, what nobody can read."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        request_id = stream.request_id
        await mesh.accept(stream)
        await mesh.chain(stream, claim(request_id, "w1"))
        await mesh.say(stream, 1, 0, 5)
        await mesh.say(stream, 1, 2, 99)  # behind a hole: given up with its owner
        await mesh.chain(stream, claim(request_id, "w2", epoch=2))
        await mesh.say(stream, 1, 1, 98)  # a zombie
        await mesh.bus.publish_stored(subjects.token_stream(client.reader), b"\xc1 newer")
        await mesh.say(stream, 2, 2, 7)
        await mesh.say(stream, 2, 1, 6)
        await mesh.say(stream, 2, 1, 97)  # a repeat
        await mesh.chain(stream, stream_end(request_id, 2, 3))
        assert await ids_of(stream) == [5, 6, 7]


async def test_an_end_may_come_before_the_word_of_admission(mesh: Played) -> None:
    """The task is queued first: a worker may be faster than admission's second publish."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await mesh.say(stream, 1, 0, 5)
        await mesh.chain(stream, stream_end(stream.request_id, 1, 1))
        async with asyncio.TaskGroup() as tasks:
            accepted = tasks.create_task(stream.accepted())
            await ids_of(stream)
            await mesh.accept(stream)
        assert accepted.result().prompt_tokens == 1


async def test_an_end_that_names_more_tokens_than_there_are_is_an_error(mesh: Played) -> None:
    """A client never takes half an answer for a whole one."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.accept(stream)
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await mesh.say(stream, 1, 0, 5)
        await mesh.chain(stream, stream_end(stream.request_id, 1, 2))
        with pytest.raises(EngineFailed):
            await ids_of(stream)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelNotFound("no such model", param="model"), 404), (QueueFull("full"), 429)],
)
async def test_a_refusal_is_raised_as_it_was(mesh: Played, error: Any, code: int) -> None:
    """By ``accepted`` and by reading; same class, same message, same parameter."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        refused = StreamError(request_id=stream.request_id, epoch=0, error=error.info)
        await mesh.chain(stream, refused)
        for wait in (stream.accepted, stream.next_deltas):
            with pytest.raises(type(error)) as caught:
                await wait()
            assert (caught.value.message, caught.value.param) == (error.message, error.param)
            assert caught.value.http_status == code
        assert client.num_open == 0


async def test_what_can_not_be_submitted_is_refused_here(mesh: Played) -> None:
    """Bad ids and names never leave; nothing is kept of them."""
    async with mesh.client() as client:
        for bad in (
            request(request_id="no.id"),
            msgspec.structs.replace(request(), model="m" * 2000),
            request(priority=2**70),
        ):
            with pytest.raises(SchemaError):
                await client.submit(bad)
        assert client.num_open == 0
    assert await waiting_work(mesh.bus) == {}


async def test_a_full_admission_queue_is_said(mesh: Played) -> None:
    """The broker takes no more requests for this model: a 429, and no stream is kept."""
    await ensure_topology(mesh.bus, Limits(queue_msgs=1))
    async with mesh.client() as client:
        await client.submit(request())
        with pytest.raises(QueueFull):
            await client.submit(request())
        assert client.num_open == 1


# Submitting twice -----------------------------------------------------------------------------


async def test_a_second_identical_submit_reads_the_same_answer(mesh: Played) -> None:
    """Nothing new is published; the whole answer is read again, be it over or under way."""
    async with mesh.client() as client:
        asked = request()
        first = await client.submit(asked)
        with pytest.raises(InvalidRequest, match="already"):
            await client.submit(asked)
        await mesh.answer(first, 5, 6, 7)
        assert await ids_of(first) == [5, 6, 7]
        again = await client.submit(asked)
        assert (await again.accepted()).prompt_tokens == 1
        assert await ids_of(again) == [5, 6, 7]
    assert await waiting_work(mesh.bus) == {SUBJECT: 1}


async def test_a_repeat_after_a_lost_answer_misses_nothing(
    mesh: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the first attempt was stored was not known. It was: tokens came before the repeat,
    and more afterwards."""

    async def answer_is_lost(*args: Any, **more: Any) -> None:
        await publish_work(*args, **more)
        raise BusUnavailable("no answer")

    async with mesh.client() as client:
        asked = request()
        with monkeypatch.context() as lost:
            lost.setattr("pipeline.submitting.publish_work", answer_is_lost)
            with pytest.raises(BusUnavailable):
                await client.submit(asked)
        assert client.num_open == 0
        other = await client.submit(request())
        first = TokenStreamName(asked.request_id, client.reader, other.deadline_unix_ms)
        await mesh.accept(first)
        await mesh.chain(first, claim(asked.request_id, "w1"))
        await mesh.say(first, 1, 0, 5)
        await mesh.accept(other)
        await other.accepted()  # so all before it went by unread
        again = await client.submit(asked)
        await mesh.say(first, 1, 1, 6)
        await mesh.chain(first, stream_end(asked.request_id, 1, 2))
        assert await ids_of(again) == [5, 6]
    assert await waiting_work(mesh.bus) == {SUBJECT: 2}


async def test_a_restarted_client_submits_again_under_its_name(mesh: Played) -> None:
    """Same reader, same id: the broker drops the repeat, and the stream tells the whole answer."""
    asked = request()
    async with mesh.client(name="batch-7") as client:
        stream = await client.submit(asked)
        await mesh.accept(stream)
        await mesh.chain(stream, claim(asked.request_id, "w1"))
        await mesh.say(stream, 1, 0, 5)
    async with mesh.client(name="batch-7") as client:
        stream = await client.submit(asked)
        await mesh.say(stream, 1, 1, 6)
        await mesh.chain(stream, stream_end(asked.request_id, 1, 2))
        assert await ids_of(stream) == [5, 6]


# Ending ---------------------------------------------------------------------------------------


async def test_cancel_ends_a_request_wherever_it_is(mesh: Played) -> None:
    """An entry on its chain; the stream raises, and so it does for everybody else."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.accept(stream)
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await stream.accepted()
        await stream.cancel("enough")
        with pytest.raises(RequestCancelled, match="enough"):
            await stream.next_deltas()
        await stream.cancel("once more")
        tip = await ClaimChain(mesh.bus).tip(client.reader, stream.request_id)
        assert tip.entry == Cancelled(request_id=stream.request_id, reason="enough")
        assert client.num_open == 0


async def test_a_bridge_tells_the_worker_itself(mesh: Played, connect: Any, until: Until) -> None:
    """Whose permissions allow it sends the quick word one hop earlier than the router."""
    bridge = await connect("bridge")
    async with MeshClient(bridge, "bridge", "b-1", tells_workers=True) as client:
        stream = await client.submit(request())
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await until(lambda: stream.view.claim)
        await stream.cancel()
        await until(lambda: mesh.ear.on(subjects.cancel("w1")))
    (word,) = mesh.ear.on(subjects.cancel("w1"))
    assert decode(word.data, CancelWord) == CancelWord(request_id=stream.request_id)


async def test_leaving_a_stream_cancels_its_request(mesh: Played) -> None:
    """As a context manager; one that has ended is left alone."""
    async with mesh.client() as client:
        async with await client.submit(request()) as left:
            await mesh.accept(left)
            await left.accepted()
        async with await client.submit(request()) as read:
            await mesh.answer(read, 5)
            await ids_of(read)
        chain = ClaimChain(mesh.bus)
        assert isinstance((await chain.tip(client.reader, left.request_id)).entry, Cancelled)
        assert not isinstance((await chain.tip(client.reader, read.request_id)).entry, Cancelled)
        assert client.num_open == 0


async def test_past_its_deadline_a_request_is_ended_by_its_reader(mesh: Played) -> None:
    """Nobody answers: the wait ends at the deadline, with an entry that stops whoever computes."""
    async with mesh.client() as client:
        soon = mesh.bus.now_unix_ms() + 150
        stream = await client.submit(request(deadline_unix_ms=soon))
        with pytest.raises(DeadlineExceeded):
            await stream.accepted()
        assert client.bus.now_unix_ms() >= soon
        tip = await ClaimChain(mesh.bus).tip(client.reader, stream.request_id)
        assert tip.entry == Expired(request_id=stream.request_id)
        with pytest.raises(DeadlineExceeded):
            await stream.next_deltas()


async def test_admission_may_set_an_earlier_deadline(mesh: Played) -> None:
    """The record's deadline is the one that holds."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.accept(stream, deadline_unix_ms=mesh.bus.now_unix_ms() + 150)
        with pytest.raises(DeadlineExceeded):
            await ids_of(stream)


async def test_an_end_without_admissions_word_does_not_wait_for_ever(mesh: Played) -> None:
    """The answer is there and Accepted never comes: the deadline holds for that as well."""
    async with mesh.client() as client:
        stream = await client.submit(request(deadline_unix_ms=mesh.bus.now_unix_ms() + 200))
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await mesh.chain(stream, stream_end(stream.request_id, 1, 0))
        with pytest.raises(DeadlineExceeded):
            await stream.accepted()


# Without the broker ---------------------------------------------------------------------------


async def test_an_answer_outlives_the_broker(mesh: Played, until: Until) -> None:
    """What was written before and after a restart is read once, in order."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.accept(stream)
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await mesh.say(stream, 1, 0, 5)
        await mesh.broker.restart()
        await until(lambda: mesh.bus.is_connected, 10)
        await mesh.say(stream, 1, 1, 6)
        await mesh.chain(stream, stream_end(stream.request_id, 1, 2))
        assert await ids_of(stream) == [5, 6]


async def test_without_a_broker_a_submit_fails_at_once(mesh: Played, until: Until) -> None:
    """Nothing is buffered to be sent later; a stream that is left is left to its deadline."""
    async with mesh.client() as client:
        open_one = await client.submit(request())
        await mesh.broker.kill()
        await until(lambda: not client.bus.is_connected)
        with pytest.raises(BusUnavailable):
            await client.submit(request())
        assert client.num_open == 1
        await open_one.aclose()
        assert client.num_open == 0
        await mesh.broker.restart()


async def test_the_deadline_passes_while_the_broker_is_away(mesh: Played, until: Until) -> None:
    """The wait ends all the same."""
    async with mesh.client() as client:
        stream = await client.submit(request(deadline_unix_ms=mesh.bus.now_unix_ms() + 300))
        await mesh.broker.kill()
        await until(lambda: not client.bus.is_connected)
        with pytest.raises(DeadlineExceeded):
            await ids_of(stream)
        assert client.num_open == 0


# Resuming -------------------------------------------------------------------------------------


async def test_another_client_reads_on_from_a_number(mesh: Played) -> None:
    """From any token, while the first one reads as well; leaving cancels nothing."""
    async with mesh.client() as client, mesh.client() as other:
        stream = await client.submit(request())
        await mesh.accept(stream)
        await mesh.chain(stream, claim(stream.request_id, "w1"))
        await mesh.say(stream, 1, 0, 5)
        await mesh.say(stream, 1, 1, 6, 7)  # one delta of two tokens
        async with other.resume(stream.request_id, reader=stream.reader) as left:
            assert [d.number for d in await left.next_deltas()] == [0, 1]
        async with other.resume(stream.request_id, 2, reader=stream.reader) as resumed:
            await mesh.say(stream, 1, 3, 8)
            await mesh.chain(stream, stream_end(stream.request_id, 1, 4))
            assert (await resumed.accepted()).max_tokens == 8
            # Token 2 lies in the delta that begins at 1.
            assert [(d.number, d.ids) async for d in resumed] == [(1, (6, 7)), (3, (8,))]
        assert await ids_of(stream) == [5, 6, 7, 8]


async def test_a_finished_answer_can_be_read_again(mesh: Played) -> None:
    """Until the stream forgets it, from the beginning or from where one wants."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.answer(stream, 5, 6, 7)
        assert await ids_of(stream) == [5, 6, 7]
        for start in range(4):
            async with client.resume(stream.request_id, start, reader=stream.reader) as again:
                assert await ids_of(again) == [5, 6, 7][start:]
                assert again.end == stream.end


async def test_an_unknown_request_can_not_be_resumed(mesh: Played) -> None:
    """InvalidRequest itself, no group of errors around it."""
    async with mesh.client() as client:
        with pytest.raises(InvalidRequest) as caught:
            async with client.resume(new_request_id()):
                pytest.fail("nothing to read")
        assert caught.value.param == "request_id"


async def test_errors_of_a_resumed_stream_come_as_they_are(mesh: Played) -> None:
    """What ends the request, and what the caller raises itself."""
    async with mesh.client() as client:
        stream = await client.submit(request())
        await mesh.accept(stream)
        await stream.cancel("enough")
        with pytest.raises(RequestCancelled, match="enough"):
            async with client.resume(stream.request_id, reader=stream.reader) as resumed:
                await ids_of(resumed)
        with pytest.raises(ZeroDivisionError):
            async with client.resume(stream.request_id, reader=stream.reader):
                raise ZeroDivisionError


async def test_nobody_reads_anothers_stream(mesh: Played) -> None:
    """The broker's permissions end at a user's own readers."""
    async with mesh.client() as client, mesh.client("alice") as alice, AsyncExitStack() as stack:
        stream = await client.submit(request())
        await mesh.answer(stream, 5)
        with pytest.raises(BusForbidden):
            await stack.enter_async_context(alice.resume(stream.request_id, reader=stream.reader))
        assert await ids_of(stream) == [5]
