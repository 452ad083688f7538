import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from loadgen.http_stream import BadHttp, HttpClient
from schemas.errors import ConfigError

Script = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    return head + await reader.readexactly(int(length.split(b":")[1]))


@asynccontextmanager
async def raw_server(script: Script) -> AsyncGenerator[str, None]:
    """Calls ``script`` with the number of each connection; closes it when that returns."""
    numbers = iter(range(100))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(next(numbers), reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"


async def post(client: HttpClient) -> tuple[int, bytes]:
    body = bytearray()

    def on_body(_: int, data: bytes) -> None:
        body.extend(data)

    async with asyncio.timeout(60):
        status = await client.post("/path", b"{}", on_body, {"X-Own": "1"})
    return status, bytes(body)


async def test_the_request_is_whole_and_well_formed() -> None:
    """Method, prefixed path, host, length and own headers stand in one head."""
    seen: list[bytes] = []

    async def script(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)

    async with raw_server(script) as url:
        client = HttpClient(url, {"Authorization": "Bearer k"})
        assert await post(client) == (200, b"ok")
        client.close()
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/path HTTP/1.1"
    host = url.removeprefix("http://").removesuffix("/base").encode()
    assert {b"Host: " + host, b"X-Own: 1", b"Authorization: Bearer k"} <= set(lines)
    assert body == b"{}"


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)  # fmt: skip
async def test_every_way_to_end_a_body_is_understood(answer: bytes, body: bytes) -> None:
    """Chunks, a length, an interim answer, and a body that ends with its connection."""

    async def script(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    async with raw_server(script) as url:
        client = HttpClient(url)
        assert await post(client) == (200, body)
        client.close()


async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    """A server may close an idle connection at any moment; the next request does not notice."""
    connections: list[int] = []

    async def script(n: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(n)
        await read_request(reader)
        writer.write(OK)
        if n == 0:  # takes the second request and leaves without a word
            await read_request(reader)

    async with raw_server(script) as url:
        client = HttpClient(url)
        assert await post(client) == (200, b"ok")
        assert await post(client) == (200, b"ok")
        client.close()
    assert connections == [0, 1]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", ConnectionError),
        (b"SSH-2.0-OpenSSH\r\n\r\n", BadHttp),
    ],
)
async def test_a_broken_answer_is_raised_once(answer: bytes, error: type[Exception]) -> None:
    """On a new connection nothing is sent twice: the failure is the request's."""
    connections: list[int] = []

    async def script(n: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(n)
        await read_request(reader)
        writer.write(answer)

    async with raw_server(script) as url:
        client = HttpClient(url)
        with pytest.raises(error):
            await post(client)
        client.close()
    assert connections == [0]


async def test_what_a_callback_raises_reaches_the_caller() -> None:
    """A reader that refuses a body ends the exchange with its own error."""

    async def script(_: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    def refuse(status: int, data: bytes) -> None:
        raise BadHttp(f"{status} {data!r}")

    async with raw_server(script) as url:
        client = HttpClient(url)
        with pytest.raises(BadHttp, match="200 b'ok'"):
            await client.post("/", b"", refuse)
        client.close()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "host:80"])
def test_an_address_that_is_no_http_is_refused(url: str) -> None:
    """The scheme and the host are checked when the client is made."""
    with pytest.raises(ConfigError, match="http"):
        HttpClient(url)
