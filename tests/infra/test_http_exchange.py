"""What the server offers beside ASGI, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from infra.http_exchange import Exchange
from infra.http_server import bind, http_server

WAIT_S = 60.0
START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"", "more_body": False}
Send = Callable[[dict[str, Any]], Awaitable[None]]


class App:
    """Begins an answer and leaves the rest to the test."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.body: bytes | None = None
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        exchange = self.exchange = Exchange.of(scope)
        assert exchange is not None
        assert not exchange.write(b"too early")
        self.body = exchange.whole_body()
        exchange.watch(self.left.set)
        await send(START)
        self.begun.set()
        await self.may_end.wait()
        exchange.unwatch()
        await send(END)
        assert not exchange.write(b"too late")


@asynccontextmanager
async def served(app: App) -> AsyncIterator[int]:
    bound = bind("127.0.0.1", 0, key="port")
    async with http_server(app, bound), asyncio.timeout(WAIT_S):
        yield bound.getsockname()[1]
        app.may_end.set()


def request(body: bytes, more: str = "") -> bytes:
    return (
        f"POST / HTTP/1.1\r\nhost: x\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body
    )


async def test_parts_are_written_at_once_between_begin_and_end() -> None:
    """As chunks, in order with what goes through ASGI; before and after nothing is written."""
    app = App()
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"body"))
        await app.begun.wait()
        assert app.exchange is not None
        assert app.exchange.write(b"one")
        assert app.exchange.write(b"two")
        app.may_end.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        assert app.body == b"body"
        writer.close()


async def test_a_client_that_leaves_is_told_of() -> None:
    """Without a task that waits for it; after that nothing is written."""
    app = App()
    async with served(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b""))
        await app.begun.wait()
        assert not app.left.is_set()
        writer.close()
        await app.left.wait()
        assert app.exchange is not None
        assert not app.exchange.write(b"to nobody")


async def test_a_full_connection_takes_nothing_more() -> None:
    """What does not read is not buffered for without end."""
    app = App()
    async with served(app) as port:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(sock, request(b""))
        await app.begun.wait()
        assert app.exchange is not None
        count = 0
        while app.exchange.write(b"x" * 65536):
            count += 1
            assert count < 1000
            await asyncio.sleep(0)
        sock.close()
        await app.left.wait()


async def test_a_body_in_parts_is_not_whole() -> None:
    """It is to be received; so is one that waits for 100 Continue."""
    for head in ("", "expect: 100-continue\r\n"):
        app = App()
        async with served(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            data = request(b"body", head)
            writer.write(data if head else data[:-2])
            await app.begun.wait()
            assert app.body is None
            writer.close()


class Direct(App):
    """Answers by the exchange alone; what it does is the test's choice."""

    def __init__(self, give: Callable[[Exchange], bool]) -> None:
        super().__init__()
        self.give = give
        self.was_given: bool | None = None

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        exchange = self.exchange = Exchange.of(scope)
        assert exchange is not None
        self.was_given = self.give(exchange)
        self.begun.set()
        await self.may_end.wait()
        if not self.was_given:
            await send(START | {"headers": [(b"content-length", b"0")]})
            await send(END)


async def test_a_whole_answer_is_one_write_and_the_next_request_is_answered() -> None:
    """Two requests that came together; on one connection, each with its length."""
    app = Direct(lambda exchange: exchange.answer(200, [(b"x-a", b"1")], b"whole"))
    app.may_end.set()
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"one") + request(b"two"))
        expected = b"HTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 5\r\n\r\nwhole"
        assert await reader.readexactly(2 * len(expected)) == 2 * expected
        writer.close()


async def test_an_answer_without_a_body_is_left_to_asgi() -> None:
    """A HEAD request has the headers of an answer and no body: nothing of it is written here."""
    app = Direct(lambda exchange: exchange.answer(200, [], b"") or exchange.begin(200, []))
    app.may_end.set()
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert app.was_given is False
        writer.close()


async def test_the_head_of_a_stream_leaves_with_its_first_part() -> None:
    """Not before, unless it is let go alone; the last part brings the end with it. A connection
    that is to close is told so, and closed."""
    for alone in (False, True):
        app = Direct(lambda exchange: exchange.begin(200, [(b"x-a", b"1")]))
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(b"", "connection: close\r\n"))
            await app.begun.wait()
            exchange = app.exchange
            assert exchange is not None
            assert not exchange.has_left
            if alone:
                exchange.flush()
                await reader.readuntil(b"\r\n\r\n")
            assert exchange.write(b"one")
            assert exchange.has_left
            assert exchange.finish(b"two")
            assert not exchange.finish(b"three")
            app.may_end.set()
            answer = await reader.read()
            assert answer.endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
            assert (b"connection: close\r\n" in answer) is not alone
            writer.close()


async def test_no_header_ends_the_headers() -> None:
    """A line break in a value is refused, and nothing of the answer is written."""

    def give(exchange: Exchange) -> bool:
        with pytest.raises(ValueError, match="x-a"):
            exchange.begin(200, [(b"x-a", b"1\r\nx-b: 2")])
        return False

    app = Direct(give)
    app.may_end.set()
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b""))
        expected = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
        assert await reader.readuntil(b"\r\n\r\n") == expected
        writer.close()


async def test_a_streamed_answer_leaves_no_circle() -> None:
    """What knew of a request is gone with it, whether or not anybody looks for garbage."""
    known: list[weakref.ref[Any]] = []

    class Request(dict[str, Any]):
        """A scope's value that tells when the scope is gone."""

    async def app(scope: Any, receive: Any, send: Send) -> None:
        scope["state"] = Request()
        known.append(weakref.ref(scope["state"]))
        exchange = Exchange.of(scope)
        assert exchange is not None
        assert exchange.begin(200, [])
        assert exchange.finish(b"all")

    gc.collect()
    gc.disable()
    try:
        bound = bind("127.0.0.1", 0, key="port")
        async with http_server(app, bound), asyncio.timeout(WAIT_S):
            reader, writer = await asyncio.open_connection(*bound.getsockname()[:2])
            for _ in range(2):  # the connection itself keeps the last one
                writer.write(request(b""))
                await reader.readuntil(b"0\r\n\r\n")
            assert len(known) == 2
            assert known[0]() is None
            writer.close()
    finally:
        gc.enable()
