"""The HTTP client of a chaos run: it goes on elsewhere, and shows what a server did wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from infra.http_server import bind, http_server
from loadgen.chaos.answer import Answer
from loadgen.chaos.cases import Case
from loadgen.chaos.clients import SseClient
from loadgen.chaos.resume import HttpResume, NoResume, Resume
from schemas.requests import SamplingParams
from schemas.tokens import Usage
from tests.loadgen.sse_server import DONE, refusal, usage_event

CASE = Case(name="c", prompt="p", sampling=SamplingParams(max_tokens=4, seed=1))
STALL_S = 0.5


def chunk(number: int, text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    content = json.dumps({"id": "cmpl-abc", "choices": [choice]})
    return b"id: %d\ndata: %b\n\n" % (number, content.encode())


def error_event(code: str) -> bytes:
    content = {"error": {"message": "m", "code": code, "type": "t"}}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


CHUNKS = [chunk(1, "a"), chunk(2, "b"), chunk(3, "c"), chunk(4, "d", "length")]
END = [usage_event(3, 4), DONE]


@dataclass
class Server:
    """Posts get ``pieces`` and then the end of the connection, or silence; GETs what follows."""

    pieces: list[bytes] = field(default_factory=list)
    refusals: list[Response] = field(default_factory=list)  # of the first posts
    is_silent: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    resumed: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    async def post(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if self.refusals:
            return self.refusals.pop(0)
        return StreamingResponse(self._send(self.pieces), media_type="text/event-stream")

    async def events(self, request: Request) -> Response:
        last = request.headers["last-event-id"]
        self.resumed.append((request.path_params["id"], last))
        rest = [*CHUNKS[int(last or 0) :], *END]
        return StreamingResponse(self._send(rest), media_type="text/event-stream")

    async def _send(self, pieces: list[bytes]) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        if self.is_silent:
            await asyncio.Event().wait()


@asynccontextmanager
async def running(*servers: Server) -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as stack:
        for server in servers:
            app = Starlette(
                routes=[
                    Route("/v1/completions", server.post, methods=["POST"]),
                    Route("/v1/requests/{id}/events", server.events),
                ]
            )
            bound = bind("127.0.0.1", 0, key="test.port")
            server.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            await stack.enter_async_context(http_server(app, bound))
        yield


async def ask(*servers: Server, resume: Resume | None = None) -> Answer:
    """From the first server on."""
    answer = Answer(1)
    async with running(*servers), asyncio.timeout(60):
        client = SseClient(
            [server.url for server in servers],
            "m",
            resume or HttpResume(STALL_S),
            stall_s=STALL_S,
            is_mesh=True,
        )
        await client.run(CASE, "label", answer)
    return answer


async def test_an_undisturbed_answer_is_read_whole() -> None:
    """Text, reason, usage; the body asks for what the case says."""
    server = Server([*CHUNKS, *END])
    answer = await ask(server)
    assert (answer.texts, answer.reasons, answer.error) == (["abcd"], ["length"], "")
    assert answer.usage == Usage(prompt_tokens=3, completion_tokens=4)
    assert (answer.request_id, answer.num_resumed) == ("abc", 0)
    [body] = server.bodies
    assert (body["max_tokens"], body["seed"], body["cache_salt"]) == (4, 1, "label")


@pytest.mark.parametrize("how", ["broken", "silent", "draining"])
async def test_a_stream_that_breaks_is_read_on_elsewhere(how: str) -> None:
    """A closed connection, silence, and a bridge that says it goes: the next server gets the
    last event's id, and the answer is whole."""
    last_word = [error_event("shutting_down")] if how == "draining" else []
    first = Server([*CHUNKS[:2], *last_word], is_silent=how == "silent")
    second = Server()
    answer = await ask(first, second)
    assert second.resumed == [("abc", "2")]
    assert (answer.texts, answer.is_complete, answer.num_resumed) == (["abcd"], True, 1)
    assert not second.bodies


async def test_before_the_first_byte_it_posts_again() -> None:
    """Nothing was read, so nothing can come twice."""
    first, second = Server([], is_silent=True), Server([*CHUNKS, *END])
    answer = await ask(first, second)
    assert (answer.texts, answer.error) == (["abcd"], "")
    assert len(second.bodies) == 1
    assert not second.resumed


async def test_what_may_be_tried_again_is() -> None:
    """429 and 503, as official clients do."""
    server = Server([*CHUNKS, *END], refusals=[refusal(503, "busy"), refusal(429, "busy")])
    answer = await ask(server)
    assert (answer.texts, len(server.bodies)) == (["abcd"], 3)


async def test_other_refusals_are_failures() -> None:
    """With status and message."""
    answer = await ask(Server(refusals=[refusal(500, "broken")]))
    assert (answer.error, answer.message) == ("http_500", "broken")


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([CHUNKS[0], error_event("engine_failed")], "engine_failed"),
        ([CHUNKS[0], b"data: {\n\n"], "bad_stream"),
    ],
)
async def test_errors_in_a_stream_are_failures(pieces: list[bytes], code: str) -> None:
    """An error event, and what is no event at all."""
    assert (await ask(Server(pieces))).error == code


async def test_a_server_without_resume_fails_a_broken_stream() -> None:
    """That is what its users get."""
    answer = await ask(Server(CHUNKS[:2]), resume=NoResume())
    assert (answer.error, answer.is_complete) == ("stream_broken", False)


async def test_leaving_closes_the_connection() -> None:
    """A client that is told to leave is gone at once, mid-stream."""
    server, answer = Server(CHUNKS[:2], is_silent=True), Answer(1)
    async with running(server), asyncio.timeout(60):
        client = SseClient([server.url], "m", NoResume(), stall_s=9, is_mesh=True)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.run(CASE, "label", answer))
            while len(answer.event_s) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
    assert not answer.has_ended
