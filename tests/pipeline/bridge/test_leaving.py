"""Clients that leave, read slowly or wait long; deadlines; a bridge that drains. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from infra.http_server import http_server
from pipeline.bridge.limits import Limits
from pipeline.bridge.listener import listen
from schemas.errors import BusUnavailable, ConfigError
from schemas.requests import InferenceRequest
from schemas.tokens import TokenDelta
from tests.pipeline.bridge.fake import (
    FakeClient,
    FakeStream,
    House,
    Script,
    build,
    chat,
    say,
    served,
)

WAIT_S = 60.0


@dataclass
class Wire:
    """One raw connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def post(self, body: dict[str, object], headers: str = "") -> None:
        """Ask for a chat; ``headers`` are whole lines."""
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{headers}"
            f"content-length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)

    async def until(self, mark: bytes) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(mark)

    async def rest(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def wire(port: int, receive_buffer: int | None = None) -> AsyncIterator[Wire]:
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    limit = 1024 if receive_buffer else 2**16  # beyond twice that, nothing is read
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def gated(gate: asyncio.Event) -> FakeClient:
    """Says one word, then waits for ``gate``."""

    def script(request: InferenceRequest) -> Script:
        said = say(request)
        return Script(steps=[said.steps[0], gate, *said.steps[1:]], end=said.end)

    return FakeClient(script)


class Flood(FakeStream):
    """Gives text without end, as fast as it is taken."""

    async def next_deltas(self) -> list[TokenDelta]:
        await asyncio.sleep(0)
        return [
            TokenDelta(request_id=self.request_id, epoch=1, number=0, ids=(1,), text="x" * 10_000)
        ]


class FloodClient(FakeClient):
    """Floods those who ask with a seed, answers the others."""

    async def submit(self, request: InferenceRequest) -> FakeStream:
        if request.sampling.seed is None:
            return await super().submit(request)
        stream = Flood(request, say(request))
        self.streams.append(stream)
        self.submitted.set()
        return stream


async def closed(house: House) -> list[str]:
    """Wait until all streams are let go of; the reasons given."""
    await house.all_closed()
    return [reason for stream in house.client.streams for reason in stream.cancelled]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(stream: bool) -> None:
    """Closing the connection cancels, streamed or not, and is logged as such."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat(stream=stream))
            if stream:
                await client.until(b"Hello")
            else:
                await house.client.submitted.wait()
        assert await closed(house) == ["the client closed the connection"]
    assert house.count("cancelled") == 1
    assert json.loads(house.output.getvalue())["outcome"] == "cancelled"
    assert house.bridge.num_open == 0


async def test_a_client_that_leaves_before_admission_decides_cancels() -> None:
    """Also while the request waits to be accepted."""
    house = build(FakeClient(lambda _: Script(steps=[], end=None, silent=True)))
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat())
            await house.client.submitted.wait()
        assert await closed(house) == ["the client closed the connection"]


async def test_a_client_that_leaves_amid_its_body_is_no_request() -> None:
    """Nothing is submitted."""
    house = build()
    async with served(house) as port:
        async with wire(port) as client:
            client.writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"
            )
            await client.writer.drain()
        async with asyncio.timeout(WAIT_S):
            await house.output.ended.wait()
    assert house.count("cancelled") == 1
    assert house.client.streams == []


async def test_a_cancel_that_the_bus_refuses_is_logged() -> None:
    """The bus may be away when a client leaves: that is said, and nothing hangs."""

    class Away(FakeStream):
        async def cancel(self, reason: str = "") -> None:
            self.is_closed.set()
            raise BusUnavailable("away")

    class AwayClient(FakeClient):
        async def submit(self, request: InferenceRequest) -> FakeStream:
            stream = Away(request, Script(steps=[asyncio.Event()], end=None))
            self.streams.append(stream)
            self.submitted.set()
            return stream

    house = build(AwayClient())
    async with served(house) as port:
        async with wire(port) as client:
            client.post(chat())
            await house.client.submitted.wait()
        await closed(house)
    events = [json.loads(line)["event"] for line in house.output.getvalue().splitlines()]
    assert events == ["cancel_failed", "request_ended"]


async def test_a_stalled_client_is_cut_and_delays_nobody() -> None:
    """A client that takes nothing stops its own stream by back-pressure; others run; after
    ``stall_s`` the kernel closes the connection and the request is cancelled."""
    house = build(FloodClient(), Limits(stall_s=1.0))
    async with served(house) as port:
        async with wire(port, receive_buffer=4096) as slow:
            slow.post(chat(stream=True, seed=1))
            await house.client.submitted.wait()
            async with wire(port) as other:
                other.post(chat(stream=True))
                await other.until(b"[DONE]")
            reasons = await closed(house)
    assert reasons == ["the client closed the connection"]


async def test_silence_is_filled_with_comments() -> None:
    """A stream without tokens gets keep-alive comments, before and between tokens."""
    gate = asyncio.Event()
    house = build(gated(gate), Limits(keep_alive_s=0.02))
    async with served(house) as port, wire(port) as client:
        client.post(chat(stream=True))
        await client.until(b"Hello")
        await client.until(b": keep-alive\n\n")
        await client.until(b": keep-alive\n\n")
        gate.set()
        await client.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_the_head_waits_until_the_request_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has the id may read on at another bridge: there must be something to read."""
    monkeypatch.setattr("pipeline.bridge.streamed._HEAD_S", 0.01)
    script = Script(steps=[asyncio.Event()], end=None, is_durable=False)
    house = build(FakeClient(lambda _: script))
    async with served(house) as port, wire(port) as client:
        client.post(chat(stream=True))
        await house.client.submitted.wait()
        (stream,) = house.client.streams
        async with asyncio.timeout(WAIT_S):
            while stream.num_looks < 3:
                await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await client.reader.read(1)
        script.is_durable = True
        assert b"x-request-id" in await client.until(b"\r\n\r\n")
        stream.is_closed.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_deadline_ends_the_wait(stream: bool) -> None:
    """Whatever the mesh does: past the deadline the client gets 504, or the error event."""
    house = build(gated(asyncio.Event()), Limits(default_deadline_s=0.05, late_s=0.05))
    async with served(house) as port, wire(port) as client:
        client.post(chat(stream=stream))
        answer = await client.until(b"}}")
        assert b'"code":"deadline_exceeded"' in answer
        assert answer.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 504")
        assert len(await closed(house)) == 1


async def test_a_drain_lets_streams_end_and_accepts_nothing_new() -> None:
    """What runs ends as usual; its connection closes; a new one finds no listener."""
    gate = asyncio.Event()
    house = build(gated(gate))
    with listen("127.0.0.1", 0, 30) as bound:
        port = bound.getsockname()[1]
        async with contextlib.AsyncExitStack() as clients:
            async with asyncio.TaskGroup() as tasks:
                async with http_server(house.bridge, bound, drain_s=WAIT_S):
                    client = await clients.enter_async_context(wire(port))
                    client.post(chat(stream=True))
                    await client.until(b"Hello")
                    house.bridge.drain()
                    idle = await clients.enter_async_context(wire(port))
                    idle.post(chat())
                    refused = await idle.rest()
                    tasks.create_task(_finish(gate, client))
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"shutting_down" in refused
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", port)


async def _finish(gate: asyncio.Event, client: Wire) -> None:
    gate.set()
    assert (await client.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_cut_ends_streams_with_an_error_event() -> None:
    """At the end of the grace time the client is told, and the request cancelled."""
    house = build(gated(asyncio.Event()))
    async with served(house) as port, wire(port) as client:
        client.post(chat(stream=True))
        await client.until(b"Hello")
        house.bridge.cut()
        assert b'"code":"shutting_down"' in await client.until(b"0\r\n\r\n")
        assert await closed(house) == ["the server shuts down"]


async def test_a_413_arrives_at_a_client_that_still_sends() -> None:
    """The refusal comes over a real connection while the body is on its way, and the connection
    serves the next request."""
    house = build()
    async with served(house) as port, wire(port) as client:
        size = 5_000_000
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        client.writer.write(head.encode())
        for _ in range(50):
            client.writer.write(b" " * (size // 50))
            await client.writer.drain()
        answer = await client.until(b"}}")
        assert answer.startswith(b"HTTP/1.1 413")
        client.post(chat())
        assert (await client.until(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_port_in_use_names_the_setting() -> None:
    """The operator learns which key to change."""
    with listen("127.0.0.1", 0, 30) as bound:
        bound.listen()
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", bound.getsockname()[1], 30)
    assert caught.value.param == "bridge.port"
