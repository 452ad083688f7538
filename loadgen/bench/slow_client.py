"""Clients on plain sockets that ask for much and read as fast, or as slowly, as they are told."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from schemas import subjects
from schemas.errors import MeshError

CUT = b'"code":"reader_too_slow"'
_RECEIVE_BYTES = 4096  # so that little of an answer lies in the reader's own kernel
_HEAD_BYTES = 2048
_READ_BYTES = 65536
_CONNECT_S = 30.0
_REQUEST_ID = re.compile(rb"x-mesh-request-id: ([0-9A-Za-z_-]+)", re.IGNORECASE)
_ASKS = {"max_tokens": 1500, "n": 8, "logprobs": 5, "ignore_eos": True, "temperature": 0}


class NotAnswered(MeshError):
    """A greedy client could not connect, or its request was not taken."""

    code = "not_answered"


@dataclass(slots=True)
class SocketClient:
    """One request, read from a socket of its own.

    ``request_id`` is known once the answer has begun.
    """

    reader: str
    request_id: str
    sock: socket.socket
    body: bytearray

    async def read_all(self) -> None:
        """Take all that comes, to the end of the connection."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self.sock, _READ_BYTES):
            self.body[:] = self.body[-len(CUT) :] + data

    async def rest(self, timeout_s: float) -> bytes:
        """What still lies on the way to a client that did not read."""
        loop, found = asyncio.get_running_loop(), bytearray()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ_BYTES)  # now it hurries
        try:
            async with asyncio.timeout(timeout_s):
                while data := await loop.sock_recv(self.sock, _READ_BYTES):
                    found += data
                    if CUT in found:
                        break
                    del found[: -len(CUT)]
        except (TimeoutError, ConnectionError):
            pass  # a connection that was reset brings nothing more
        return bytes(found)


@asynccontextmanager
async def http_client(url: str, model: str) -> AsyncIterator[SocketClient]:
    """Asks a bridge, and has read the head of its answer; leaving closes the connection.

    Raises:
        NotAnswered: it did not begin to stream.
    """
    parts = urlsplit(url)
    body = msgspec.json.encode({"model": model, "prompt": "slow", "stream": True, **_ASKS})
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: mesh\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    sock = await _connected(parts.hostname or "", parts.port or 80, request)
    try:
        head = b""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_S):
            while b"\r\n\r\n" not in head and (data := await loop.sock_recv(sock, _HEAD_BYTES)):
                head += data
        found = _REQUEST_ID.search(head)
        if found is None:
            raise NotAnswered(f"the bridge said {head[:200]!r}")
        yield SocketClient("", found.group(1).decode(), sock, bytearray())
    finally:
        sock.close()


@asynccontextmanager
async def bus_client(nats_url: str, model: str) -> AsyncIterator[SocketClient]:
    """Publishes a request and subscribes to its tokens, in the broker's own words."""
    parts = urlsplit(nats_url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    login = {"user": user, "pass": password, "verbose": False, "pedantic": False}
    request_id = secrets.token_hex(16)
    reader = subjects.default_reader(request_id)
    request: dict[str, Any] = {
        "schema": "inference-request/1", "request_id": request_id, "model": model,
        "prompt": "slow", "sampling": _ASKS,
    }  # fmt: skip
    data = msgspec.json.encode(request)
    live = subjects.live(subjects.reader_filter(reader))
    words = b"CONNECT %b\r\nSUB %b 1\r\nPUB %b %d\r\n%b\r\n" % (
        msgspec.json.encode(login), live.encode(), subjects.admission(model).encode(),
        len(data), data,
    )  # fmt: skip
    sock = await _connected(parts.hostname or "", parts.port or 4222, words)
    try:
        yield SocketClient(reader, request_id, sock, bytearray())
    finally:
        sock.close()


async def _connected(host: str, port: int, words: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        async with asyncio.timeout(_CONNECT_S):
            await loop.sock_connect(sock, (host, port))
            await loop.sock_sendall(sock, words)
    except OSError as error:
        sock.close()
        raise NotAnswered(f"{host}:{port}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock
