"""What a stranger may send: bounds on heads, time and connections, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from infra.http_protocol import HttpBounds
from infra.http_server import bind, http_server
from infra.task_scope import task_scope

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE_S = 60.0


class App:
    """Reads the body of a POST to ``/slow`` until it is complete; refuses others at once. ``hold``
    keeps answers to ``/held`` back."""

    def __init__(self) -> None:
        self.hold = asyncio.Event()
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/held":
            await self.hold.wait()
        status = 413 if scope["path"] == "/refused" else 200
        if scope["path"] == "/slow":
            self.bodies.append(await self._read(receive))
        body = scope["path"].encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _read(self, receive: Any) -> bytes:
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)


class Peer:
    """A client that says bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        async with asyncio.timeout(PATIENCE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.partition(": ") for line in head[1:] if line)
            headers = {name: value for name, _, value in pairs}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        """Wait for the end of the connection; whether nothing came before it."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


class Server:
    """A served application and clients of it."""

    def __init__(self, app: App, port: int, stack: contextlib.AsyncExitStack) -> None:
        self.app = app
        self._port = port
        self._stack = stack

    async def connect(self) -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._stack.callback(writer.close)
        return Peer(reader, writer)


@contextlib.asynccontextmanager
async def serving(**bounds: Any) -> AsyncIterator[Server]:
    app, bound = App(), bind("127.0.0.1", 0, key="port")
    async with http_server(app, bound, bounds=HttpBounds(**bounds)):
        async with contextlib.AsyncExitStack() as stack:
            yield Server(app, bound.getsockname()[1], stack)


def check_refusal(said: tuple[int, dict[str, str], bytes], status: int, code: str) -> None:
    """An error in OpenAI's shape, with an id, that ends the connection."""
    assert said[0] == status
    assert json.loads(said[2])["error"]["code"] == code
    assert said[1]["x-request-id"]
    assert said[1]["connection"] == "close"


async def test_a_head_over_the_limit_is_431() -> None:
    """In one piece, in many, or as one endless header; what fits is served."""
    async with serving(max_head_bytes=2000) as server:
        peer = await server.connect()
        peer.say(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 1900 + b"\r\n\r\n")
        assert (await peer.answer())[0] == 200
        for size in (2000, 300_000):
            peer = await server.connect()
            peer.say(b"GET / HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * size + b"\r\n\r\n")
            said = await peer.answer()
            check_refusal(said, 431, "headers_too_large")
            assert await peer.is_closed()
        peer = await server.connect()
        peer.say(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 2000)
        check_refusal(await peer.answer(), 431, "headers_too_large")


async def test_endless_trailers_are_431() -> None:
    """They belong to no body that the application could bound."""
    async with serving(max_head_bytes=2000) as server:
        peer = await server.connect()
        peer.say(b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx: ")
        check_refusal(await answer_to_drips(peer, b"a" * 500), 431, "headers_too_large")


async def test_a_refusal_names_the_request() -> None:
    """The client's own id comes back, as far as the head could be read."""
    async with serving(max_head_bytes=2000) as server:
        peer = await server.connect()
        peer.say(b"GET / HTTP/1.1\r\nx-request-id: mine\r\nx: " + b"a" * 2500 + b"\r\n\r\n")
        assert (await peer.answer())[1]["x-request-id"] == "mine"


async def test_a_head_that_drips_is_408() -> None:
    """However steadily it goes on: the time counts from its first byte."""
    async with serving(head_s=0.3, idle_s=600) as server:
        peer = await server.connect()
        peer.say(b"GET / HTTP/1.1\r\n")
        check_refusal(await answer_to_drips(peer, b"a: b\r\n"), 408, "request_timeout")


async def answer_to_drips(peer: Peer, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """What comes while ``data`` is said again and again."""

    async def drip() -> None:
        while True:
            await asyncio.sleep(0.01)
            peer.say(data)

    async with task_scope() as tasks:
        tasks.create_task(drip())
        return await peer.answer()


async def test_a_connection_without_a_request_is_closed() -> None:
    """Before the first, between two, and when nothing but line ends comes."""
    async with serving(idle_s=0.2) as server:
        silent, used, lines = [await server.connect() for _ in range(3)]
        used.say(GET)
        assert (await used.answer())[0] == 200
        lines.say(b"\r\n\r\n")
        for peer in (silent, used, lines):
            assert await peer.is_closed()


async def test_a_body_takes_the_time_that_the_application_gives_it() -> None:
    """The limit for heads is none for bodies, nor for a long answer."""
    async with serving(head_s=0.2, idle_s=0.2) as server:
        peer = await server.connect()
        peer.say(b"POST /slow HTTP/1.1\r\ncontent-length: 4\r\n\r\nab")
        await asyncio.sleep(0.5)
        peer.say(b"cd")
        assert (await peer.answer())[0] == 200
        assert server.app.bodies == [b"abcd"]
        held = await server.connect()
        held.say(b"GET /held HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.5)
        server.app.hold.set()
        assert (await held.answer())[0] == 200


async def test_what_follows_an_early_answer_is_read_away_for_a_while() -> None:
    """A client that sends on gets its answer, and may ask again; one that stops in mid-body is
    closed."""
    async with serving(head_s=0.5, idle_s=600) as server:
        sends, stops = await server.connect(), await server.connect()
        for peer in (sends, stops):
            peer.say(b"POST /refused HTTP/1.1\r\ncontent-length: 100\r\n\r\nab")
            assert (await peer.answer())[0] == 413
        sends.say(b"a" * 98 + GET)
        assert (await sends.answer())[0] == 200
        assert await stops.is_closed()


async def test_one_connection_too_many_is_503() -> None:
    """Told at its request, with the time to come again; twice too many are just closed. Who was
    there goes on, and a place that is free again is given away."""
    async with serving(max_connections=2) as server:
        first, second, third = [await server.connect() for _ in range(3)]
        for peer in (first, second):
            peer.say(GET)
            assert (await peer.answer())[0] == 200
        third.say(GET)
        said = await third.answer()
        check_refusal(said, 503, "too_many_connections")
        assert said[1]["retry-after"] == "1"
        held = [await server.connect() for _ in range(2)]
        hopeless = await server.connect()
        assert await hopeless.is_closed()
        first.say(GET)
        assert (await first.answer())[0] == 200
        for peer in (second, *held):
            peer.writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while not await is_served(await server.connect()):
                await asyncio.sleep(0.01)


async def is_served(peer: Peer) -> bool:
    peer.say(GET)
    try:
        return (await peer.answer())[0] == 200
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return False


async def test_a_good_request_is_answered_before_bad_bytes_behind_it() -> None:
    """Its answer is whole and the last; what is broken itself is told so."""
    async with serving() as server:
        peer = await server.connect()
        peer.say(b"GET /held HTTP/1.1\r\n\r\n" + b"\x00\xff nonsense\r\n\r\n")
        server.app.hold.set()
        said = await peer.answer()
        assert (said[0], said[2]) == (200, b"/held")
        assert await peer.is_closed()
        for bad in (
            b"\x00\x01\x02\r\n\r\n",
            b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
            b"POST /slow HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
            b"GET http:/// HTTP/1.1\r\n\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        ):
            peer = await server.connect()
            peer.say(bad)
            check_refusal(await peer.answer(), 400, "bad_http")


async def test_requests_in_one_packet_are_answered_in_order() -> None:
    """One that asks for another protocol, which is not served, is the last: what follows it is no
    request of this protocol."""
    async with serving() as server:
        peer = await server.connect()
        upgrade = b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 100\r\n\r\n"
        peer.say(GET + GET.replace(b"/ ", b"/2 ", 1) + b"POST /3 HTTP/1.1\r\n" + upgrade + GET)
        assert [(await peer.answer())[2] for _ in range(3)] == [b"/", b"/2", b"/3"]
        assert await peer.is_closed()
