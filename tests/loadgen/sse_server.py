"""A small OpenAI-compatible server on loopback: its answers, and its faults, are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from infra.http_server import bind, http_server


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 2}}})


DONE = b"data: [DONE]\n\n"


@dataclass
class SseServer:
    """``script`` replaces the answer's pieces; ``refusal`` the whole answer."""

    script: list[bytes] | None = None
    refusal: Response | None = None
    is_stuck: bool = False  # after the first event nothing more comes
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    peers: set[tuple[str, int]] = field(default_factory=set)
    first_sent: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  # a client went away in mid-stream
    url: str = ""

    async def answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        assert request.client is not None
        self.peers.add((request.client.host, request.client.port))
        if self.refusal is not None:
            return self.refusal
        is_chat = "chat" in request.url.path
        pieces = self._pieces(self.bodies[-1], is_chat) if self.script is None else self.script
        return StreamingResponse(self._stream(pieces), media_type="text/event-stream")

    async def _stream(self, pieces: list[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            for piece in pieces:
                yield piece
                self.first_sent.set()
                if self.is_stuck:
                    await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.set()
            raise

    def _pieces(self, body: dict[str, Any], is_chat: bool) -> list[bytes]:
        count = body["max_tokens"]
        usage = usage_event(len(body.get("prompt", ())), count)
        if not is_chat:
            texts = [text_event("w") for _ in range(count - 1)]
            return [*texts, text_event("w", "length"), usage, DONE]

        def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
            return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

        opening = chunk({"role": "assistant", "content": ""})
        return [opening, *[chunk({"content": "w"})] * count, chunk({}, "length"), usage, DONE]


@asynccontextmanager
async def sse_server(server: SseServer) -> AsyncGenerator[SseServer, None]:
    """Run ``server`` while the block runs; ``server.url`` is its address."""
    paths = ("/v1/completions", "/v1/chat/completions")
    app = Starlette(routes=[Route(path, server.answer, methods=["POST"]) for path in paths])
    bound = bind("127.0.0.1", 0, key="test.port")
    server.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    async with http_server(app, bound):
        yield server


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": "some_code"}}, status_code=status)
