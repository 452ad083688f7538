"""Any bytes on a connection: never a 5xx, nothing dies, the next request is served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from infra.http_protocol import HttpBounds
from infra.http_server import http_server
from pipeline.bridge.limits import Limits
from pipeline.bridge.listener import listen
from tests.pipeline.bridge.fake import House, build, chat, patient

QUIET_S = 0.3
BODY = json.dumps(chat(max_tokens=3)).encode()
PATHS = st.sampled_from(
    [b"/v1/chat/completions", b"/v1/completions", b"/v1/models", b"/v1/models/%F0%9F%98%80", b"/x",
     b"/v1/requests/%00/events", b"/health", b"/metrics", b"/openapi.json", b"/tokenize", b"*",
     b"//", b"/%", b"/\xff\xfe", b"http://a/v1/models", b"?", b"/v1/models?\xc3("]
)  # fmt: skip
METHODS = st.sampled_from(
    [b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"DELETE", b"PATCH", b"CONNECT", b"TRACE",
     b"PRI", b"get", b""]
)  # fmt: skip
VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1", b""])
HEADERS = st.sampled_from(
    [b"host: x", b"connection: close", b"connection: keep-alive", b"expect: 100-continue",
     b"upgrade: websocket\r\nconnection: upgrade", b"upgrade: h2c\r\nconnection: upgrade",
     b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"content-length: 5",
     b"content-length: 5\r\ncontent-length: 6", b"content-length: -1", b"content-length: 99999999",
     b"content-length: 9999999999999999999999", b"x-request-id: \xff\xfe", b"x-request-id: a\tb",
     b"x: " + b"y" * 5000, b" folded: z", b"a b: c", b": nameless", b"x-mesh-resume-window: -1",
     b"last-event-id: \xf0", b"authorization: Bearer \xc3\x28", b"origin: null",
     b"access-control-request-method: POST", b"bare\ncr: x"]
)  # fmt: skip
BODIES = st.sampled_from(
    [b"", BODY, BODY[:-3], BODY.replace(b"Hi", b"\xff\xc3("), b"5\r\nhello\r\n0\r\n\r\n", b"zz\r\n",
     b"5;x=" + b"y" * 100 + b"\r\nhello\r\n0\r\na: b\r\n\r\n", b"f" * 17 + b"\r\n", b"\x00" * 9,
     b"[" * 3000]
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Something like a request; its parts may not fit together."""
    line = b" ".join([draw(METHODS), draw(PATHS), draw(VERSIONS)])
    headers = draw(st.lists(HEADERS, max_size=3))
    body = draw(BODIES)
    if draw(st.booleans()):
        headers.append(b"content-length: %d" % len(body))
    return b"\r\n".join([line, *headers, b"", b""]) + body


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Several of them behind each other, cut off somewhere, with noise in between, in pieces."""
    parts = draw(st.lists(requests() | st.binary(max_size=60), min_size=1, max_size=3))
    data = b"".join(parts)
    data = data[: draw(st.integers(1, len(data)))] if data and draw(st.booleans()) else data
    cut = draw(st.integers(0, len(data)))
    return [data[:cut], data[cut:]]


async def exchange(port: int, pieces: list[bytes]) -> bytes:
    """All that comes back until the server closes, which it does soon when nothing more is said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    said = b""
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(2**16):
            said += part
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return said


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
GOOD = HEAD % len(BODY) + BODY


@contextlib.asynccontextmanager
async def serving(house: House) -> AsyncIterator[int]:
    bounds = HttpBounds(max_head_bytes=4096, head_s=QUIET_S, idle_s=QUIET_S)
    with listen("127.0.0.1", 0, 60.0) as bound:
        async with http_server(house.bridge, bound, bounds=bounds):
            yield bound.getsockname()[1]


async def served_after(port: int, many: list[list[bytes]]) -> None:
    """Say all at once, each on a connection of its own; then be served."""
    async with asyncio.timeout(100):
        for said in await asyncio.gather(*(exchange(port, pieces) for pieces in many)):
            check(said)
        while not (answer := await exchange(port, [GOOD])).startswith(b"HTTP/1.1 200 "):
            assert not answer or b" 408 " in answer, answer  # a machine that was too busy


def check(said: bytes) -> None:
    """Each answer has a status below 500 and an id; each refusal is an error in OpenAI's shape."""
    for found in re.finditer(rb"HTTP/1\.1 (\d{3}) [^\r]*\r\n(.*?)\r\n\r\n", said, re.DOTALL):
        status, head = int(found[1]), found[2]
        if status == 100:
            continue
        assert status < 500, said
        assert b"\r\nx-request-id: " in head, said
        length = re.search(rb"content-length: (\d+)", head)
        body = said[found.end() : found.end() + int(length[1])] if length else b""
        if status >= 400 and body.startswith(b"{"):
            assert json.loads(body)["error"]["code"]
    assert not said or said.startswith(b"HTTP/1.1 "), said


def test_any_bytes() -> None:
    """Broken requests, chunks, heads and pipelines, cut off at any place."""
    house = build(limits=Limits(body_s=QUIET_S))
    with asyncio.Runner() as runner:
        server = serving(house)
        port = runner.run(server.__aenter__())

        @settings(patient, max_examples=30)
        @given(many=st.lists(streams(), min_size=8, max_size=16))
        def any_bytes(many: list[list[bytes]]) -> None:
            runner.run(served_after(port, many))

        any_bytes()
        assert house.bridge.num_open == 0
        runner.run(server.__aexit__(None, None, None))
    assert "request_crashed" not in house.output.getvalue()
