"""Readers that share a stream: several of one request, many of one reader, slow ones, late ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

import pipeline.reader_feed
import pipeline.submitting
from infra.bus import Bus
from pipeline.claim_chain import ClaimChain
from pipeline.client import MeshClient, new_request_id
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.errors import InvalidRequest, ReaderTooSlow
from schemas.requests import InferenceRequest
from schemas.tokens import Accepted, Cancelled, TokenBatch, TokenDelta
from tests.conftest import Connect, Until
from tests.pipeline.rig import batch, claim, record, store, stream_end

THEIRS = "bridge.bridge-a-0a1b2c3d"
LIMIT = 8


@pytest_asyncio.fixture
async def client(bus: Bus, connect: Connect) -> AsyncIterator[MeshClient]:
    """A bridge's client, as the second of two bridges has it."""
    connection = await connect("bridge")
    async with (
        MeshClient(connection, "bridge", "bridge-b-0a1b2c3d", max_waiting=LIMIT) as mesh,
        asyncio.timeout(60),
    ):
        yield mesh


def accepted(request_id: str) -> Accepted:
    return Accepted(
        request_id=request_id, model="tiny", revision="r1", prompt_tokens=1, max_tokens=99,
        admitted_unix_ms=1, deadline_unix_ms=2**50,
    )  # fmt: skip


async def admit(bus: Bus, request_id: str, reader: str = THEIRS) -> int:
    """Record, Accepted and a claim; where the record lies."""
    seq = await store(bus, subjects.request_record(request_id), record(request_id, reader=reader))
    await store(bus, subjects.token_stream(reader), accepted(request_id))
    await store(bus, subjects.chain(reader, request_id), claim(request_id, "w"))
    return seq


async def say(
    bus: Bus, request_id: str, numbers: range, reader: str = THEIRS, *, ends: bool = False
) -> None:
    """Tokens ``numbers`` of a request, each its own delta."""
    deltas = tuple(
        TokenDelta(request_id=request_id, epoch=1, number=number, ids=(number,))
        for number in numbers
    )
    if deltas:
        await store(bus, subjects.token_stream(reader), TokenBatch(worker="w", deltas=deltas))
    if ends:
        end = stream_end(request_id, 1, numbers.stop)
        await store(bus, subjects.chain(reader, request_id), end)


async def read(stream: TokenStream, count: int) -> list[int]:
    """The ids of at least ``count`` tokens."""
    ids: list[int] = []
    while len(ids) < count:
        ids += [token for delta in await stream.next_deltas() for token in delta.ids]
    return ids


async def read_all(stream: TokenStream) -> list[int]:
    return [token async for delta in stream for token in delta.ids]


async def test_several_readers_of_one_request_each_get_all_of_it(
    bus: Bus, client: MeshClient
) -> None:
    """They come at different times, and one that leaves takes nothing from the others."""
    request_id = new_request_id()
    seq = await admit(bus, request_id)
    await say(bus, request_id, range(3))
    async with AsyncExitStack() as leaving:
        first = await leaving.enter_async_context(
            client.resume(request_id, reader=THEIRS, start_seq=seq)
        )
        assert await read(first, 3) == [0, 1, 2]
        await say(bus, request_id, range(3, 5))
        async with client.resume(request_id, reader=THEIRS, start_seq=seq) as second:
            assert await read(second, 5) == [0, 1, 2, 3, 4]
            await leaving.aclose()
            await say(bus, request_id, range(5, 7), ends=True)
            assert await read_all(second) == [5, 6]


async def test_a_client_resumes_what_it_submitted_beside_the_first_reader(
    bus: Bus, client: MeshClient
) -> None:
    """The same bridge may be asked: no second subscription, and the first reader goes on."""
    request = InferenceRequest(request_id=new_request_id(), model="tiny", prompt="x")
    request_id, reader = request.request_id, client.reader
    stream = await client.submit(request)
    seq = await admit(bus, request_id, reader)
    await say(bus, request_id, range(2), reader)
    async with client.resume(request_id, reader=reader, start_seq=seq) as again:
        assert await read(again, 2) == [0, 1]
        await say(bus, request_id, range(2, 4), reader, ends=True)
        assert await read_all(again) == [2, 3]
    assert await read_all(stream) == [0, 1, 2, 3]


async def test_many_that_come_at_once_share_subscription_and_replays(
    bus: Bus, client: MeshClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead bridge's clients come all together: its reader is read a few times, not once per
    client, and each gets its own request whole."""
    ids = [new_request_id() for _ in range(20)]
    seqs = {request_id: await admit(bus, request_id) for request_id in ids}
    for request_id in ids:
        await say(bus, request_id, range(2))
    replays, subscriptions = [], []
    original_replay, original_subscribe = pipeline.reader_feed.replay, client.bus.subscribe

    def counting(*args: Any, **more: Any) -> Any:
        replays.append(more)
        return original_replay(*args, **more)

    async def subscribing(subject: str, *args: Any, **more: Any) -> Any:
        subscriptions.append(subject)
        return await original_subscribe(subject, *args, **more)

    monkeypatch.setattr(pipeline.reader_feed, "replay", counting)
    monkeypatch.setattr(client.bus, "subscribe", subscribing)

    async def follow(request_id: str) -> list[int]:
        async with client.resume(request_id, reader=THEIRS, start_seq=seqs[request_id]) as stream:
            got = await read(stream, 2)
            together.release()
            return got + await read_all(stream)

    together = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(follow(request_id)) for request_id in ids]
        for _ in ids:
            await together.acquire()
        for request_id in ids:
            await say(bus, request_id, range(2, 4), ends=True)
    assert [task.result() for task in found] == [[0, 1, 2, 3]] * 20
    assert len(replays) <= 4
    assert subscriptions.count(subjects.live(subjects.reader_filter(THEIRS))) == 1


async def test_one_that_leaves_amid_a_replay_leaves_the_others_theirs(
    bus: Bus, client: MeshClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does the replay for all may be cancelled: the next one does it again."""
    ids = [new_request_id(), new_request_id()]
    seqs = [await admit(bus, request_id) for request_id in ids]
    for request_id in ids:
        await say(bus, request_id, range(3), ends=True)
    begun, original = asyncio.Event(), pipeline.reader_feed.replay

    async def stuck(*_: Any, **__: Any) -> AsyncIterator[Any]:
        begun.set()
        monkeypatch.setattr(pipeline.reader_feed, "replay", original)
        await asyncio.Event().wait()
        yield  # never

    monkeypatch.setattr(pipeline.reader_feed, "replay", stuck)

    async def follow(request_id: str, seq: int) -> list[int]:
        async with client.resume(request_id, reader=THEIRS, start_seq=seq) as stream:
            return await read_all(stream)

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(follow(ids[0], seqs[0]))
        await begun.wait()
        second = tasks.create_task(follow(ids[1], seqs[1]))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == [0, 1, 2]
    assert first.cancelled()


async def test_a_gap_is_filled_although_its_filler_leaves(
    bus: Bus, client: MeshClient, until: Until
) -> None:
    """Of two readers the one that looks after gaps leaves at the moment one shows."""
    request_id = new_request_id()
    seq = await admit(bus, request_id)
    async with AsyncExitStack() as leaving:
        await leaving.enter_async_context(client.resume(request_id, reader=THEIRS, start_seq=seq))
        async with client.resume(request_id, reader=THEIRS, start_seq=seq) as second:
            client._feeds[THEIRS]._messages.check()
            await leaving.aclose()
            await say(bus, request_id, range(2), ends=True)
            assert await read_all(second) == [0, 1]


async def test_nothing_before_the_start_is_read(bus: Bus, client: MeshClient) -> None:
    """A busy reader's older traffic is not read from the beginning, unless nobody can say where
    the request begins; then it must be found."""
    request_id = new_request_id()
    await admit(bus, request_id)
    seq = await store(bus, subjects.token_stream(THEIRS), batch(request_id, 1, 0, 5))
    async with client.resume(request_id, reader=THEIRS, start_seq=seq + 1) as stream:
        assert not stream.is_known
    async with client.resume(request_id, reader=THEIRS) as stream:
        assert await read(stream, 1) == [5]
    with pytest.raises(InvalidRequest):
        async with client.resume(new_request_id(), reader=THEIRS):
            pass


async def test_nothing_is_left_when_the_last_reader_leaves(bus: Bus, client: MeshClient) -> None:
    """No subscription, no hub entry; the next one begins anew."""
    request_id = new_request_id()
    seq = await admit(bus, request_id)
    for _ in range(2):
        async with client.resume(request_id, reader=THEIRS, start_seq=seq):
            assert set(client._feeds) == {client.reader, THEIRS}
            feed = client._feeds[THEIRS]
        assert set(client._feeds) == {client.reader}
        assert len(feed.hub) == 0


async def submitted(bus: Bus, client: MeshClient) -> TokenStream:
    stream = await client.submit(
        InferenceRequest(request_id=new_request_id(), model="tiny", prompt="x")
    )
    await admit(bus, stream.request_id, client.reader)
    await stream.accepted()
    return stream


async def test_a_stream_that_is_not_read_is_cut_alone(
    bus: Bus, client: MeshClient, until: Until
) -> None:
    """Over the limit its request is cancelled at once, and its reader hears why when it comes;
    another stream of the same reader goes on."""
    slow, other = await submitted(bus, client), await submitted(bus, client)
    await say(bus, slow.request_id, range(LIMIT), client.reader)
    await say(bus, other.request_id, range(1), client.reader)
    assert await read(other, 1) == [0]
    assert len(slow._ready) == LIMIT
    await say(bus, slow.request_id, range(LIMIT, LIMIT + 1), client.reader)
    chain = ClaimChain(bus)
    while not (tip := await chain.tip(client.reader, slow.request_id)).has_ended:
        await asyncio.sleep(0.01)
    assert tip.entry == Cancelled(request_id=slow.request_id, reason="its reader is too slow")
    assert slow._ready == []
    with pytest.raises(ReaderTooSlow):
        await slow.next_deltas()
    await slow.aclose()
    await say(bus, other.request_id, range(1, 2), client.reader, ends=True)
    assert await read_all(other) == [1]


async def test_who_reads_in_time_is_never_cut(bus: Bus, client: MeshClient) -> None:
    """The limit is on what waits, not on what comes."""
    stream = await submitted(bus, client)
    for start in range(0, 5 * LIMIT, LIMIT):
        await say(bus, stream.request_id, range(start, start + LIMIT), client.reader)
        assert len(await read(stream, LIMIT)) == LIMIT


async def test_a_long_past_that_comes_at_once_is_no_slowness(bus: Bus, client: MeshClient) -> None:
    """Who resumes gets all there is, however much, and has room for what comes after it."""
    request_id = new_request_id()
    seq = await admit(bus, request_id)
    await say(bus, request_id, range(5 * LIMIT))
    async with client.resume(request_id, reader=THEIRS, start_seq=seq) as stream:
        await say(bus, request_id, range(5 * LIMIT, 6 * LIMIT), ends=True)
        while stream.view.terminal is None:
            await asyncio.sleep(0.01)
        assert await read_all(stream) == list(range(6 * LIMIT))


async def test_a_slow_resumed_reader_does_not_cancel(bus: Bus, client: MeshClient) -> None:
    """Others may be reading the same request: it is only cut itself."""
    request_id = new_request_id()
    seq = await admit(bus, request_id)
    async with (
        client.resume(request_id, reader=THEIRS, start_seq=seq) as slow,
        client.resume(request_id, reader=THEIRS, start_seq=seq) as quick,
    ):
        for number in range(LIMIT + 1):
            await say(bus, request_id, range(number, number + 1))
            await read(quick, 1)
        with pytest.raises(ReaderTooSlow):
            await slow.next_deltas()
        await say(bus, request_id, range(LIMIT + 1, LIMIT + 2), ends=True)
        assert await read_all(quick) == [LIMIT + 1]


async def test_a_submit_that_is_cancelled_cancels_its_request(
    bus: Bus, client: MeshClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been stored: nobody would ever read it."""
    stored, original = asyncio.Event(), pipeline.submitting.publish_work

    async def unanswered(*args: Any, **more: Any) -> Any:
        await original(*args, **more)
        stored.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(pipeline.submitting, "publish_work", unanswered)
    request = InferenceRequest(request_id=new_request_id(), model="tiny", prompt="x")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.submit(request))
        await stored.wait()
        task.cancel()
    assert task.cancelled()
    tip = await ClaimChain(bus).tip(client.reader, request.request_id)
    assert tip.entry == Cancelled(request_id=request.request_id, reason="reader left")
    assert client.num_open == 0
