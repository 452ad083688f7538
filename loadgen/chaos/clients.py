"""Clients as users write them: one on the bus, one over HTTP that reconnects and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from loadgen.chaos.answer import Answer
from loadgen.chaos.cases import Case
from loadgen.http_stream import BadHttp, HttpClient
from pipeline.client import MeshClient, new_request_id
from pipeline.token_stream import TokenStream
from schemas.errors import BusUnavailable, MeshError
from schemas.tokens import TokenDelta, Usage

RETRY_S = 0.1
RESUME_WINDOW_S = "30"  # a request outlives its client for so long
_LEAVE_S = 2.0
_RETRYABLE_STATUS = (429, 503)
_RETRYABLE_CODES = ("shutting_down",)  # of error events: the bridge goes, the request stays
_COMPLETIONS = "/v1/completions"
_DIGITS = 3  # of logprobs: what two orders of summing agree in


class Client(Protocol):
    """One way to ask."""

    async def run(self, case: Case, label: str, answer: Answer) -> None:
        """Send ``case`` and read ``answer`` to its end, through whatever happens; cancelled, it
        leaves as a client leaves."""


class BusClient:
    """Publishes to admission and reads the token stream."""

    def __init__(self, client: MeshClient, model: str, timeout_s: float) -> None:
        self._client = client
        self._model = model
        self._timeout_s = timeout_s

    async def run(self, case: Case, label: str, answer: Answer) -> None:
        """See :class:`Client`."""
        answer.request_id = new_request_id()
        stream = await self._submit(case, label, answer)
        try:
            while deltas := await stream.next_deltas():
                take_deltas(answer, deltas)
            assert stream.end is not None, "complete"
            answer.reasons = list(stream.end.finish_reasons)
            answer.complete(stream.end.usage, time.monotonic())
        except MeshError as error:
            answer.fail(error.code, error.message)
        except asyncio.CancelledError:
            with contextlib.suppress(MeshError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await stream.aclose()
            raise

    async def _submit(self, case: Case, label: str, answer: Answer) -> TokenStream:
        """Published once the bus takes it; a repeat under the same id is harmless."""
        deadline = self._client.bus.now_unix_ms() + int(self._timeout_s * 1000)
        request = case.message(self._model, answer.request_id, label, deadline)
        while True:
            try:
                return await self._client.submit(request)
            except BusUnavailable:
                await asyncio.sleep(RETRY_S)


def take_deltas(answer: Answer, deltas: Sequence[TokenDelta]) -> None:
    """Note what came at one time."""
    answer.event_s.append(time.monotonic())
    for delta in deltas:
        answer.ids[delta.index] += delta.ids
        answer.texts[delta.index] += delta.text
        answer.logprobs[delta.index] += [
            (one.token_id, round(one.logprob, _DIGITS)) for one in delta.logprobs or ()
        ]


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class SseText:
    """The body of one connection; what it brings goes into ``answer``."""

    def __init__(self, answer: Answer) -> None:
        self.is_done = False
        self.error: _Error | None = None
        self._answer = answer
        self._usage: Usage | None = None
        self._rest = b""

    def on_body(self, status: int, data: bytes) -> None:
        """A piece of the body.

        Raises:
            msgspec.DecodeError: an event is no completion chunk.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if status != 200:
            self._rest = b"\n".join([*lines, self._rest])
            return
        for line in lines:
            if line.startswith(b"id:"):
                self._answer.last_event_id = line[3:].strip().decode()
            elif line.startswith(b"data:"):
                self._on_event(line[5:].strip())

    def refusal(self) -> _Error:
        """The error in a body that came with another status than 200."""
        try:
            return _as_error(_decode_chunk(self._rest).error) or _Error()
        except msgspec.DecodeError:
            return _Error(message=self._rest[:200].decode(errors="replace"))

    def _on_event(self, data: bytes) -> None:
        answer, now_s = self._answer, time.monotonic()
        if data == b"[DONE]":
            self.is_done = True
            answer.complete(self._usage, now_s)
            return
        chunk = _decode_chunk(data)
        self.error = _as_error(chunk.error) or self.error
        answer.request_id = answer.request_id or chunk.id.partition("-")[2]
        for choice in chunk.choices:
            answer.texts[choice.index] += choice.text
            answer.num_events[choice.index] += choice.finish_reason is None or bool(choice.text)
            answer.reasons[choice.index] = choice.finish_reason or answer.reasons[choice.index]
            answer.event_s.append(now_s)
        if chunk.usage is not None:
            self._usage = Usage(
                prompt_tokens=chunk.usage.prompt_tokens,
                completion_tokens=chunk.usage.completion_tokens,
            )


def _as_error(error: _Error | str | None) -> _Error | None:
    return _Error(message=error) if isinstance(error, str) else error


class Resume(Protocol):
    """Reads on where a broken connection left a request."""

    async def read_on(self, url: str, answer: Answer) -> None:
        """Bring ``answer`` further; it may still not have ended.

        Raises:
            OSError, BadHttp, TimeoutError: this server can't, just now.
        """


class NoResume:
    """For servers that have none: a broken stream is a failed request."""

    async def read_on(self, url: str, answer: Answer) -> None:
        """See :class:`Resume`."""
        answer.fail("stream_broken", "the connection broke, and this server can't resume")


class HttpResume:
    """``GET /v1/requests/<id>/events`` with ``Last-Event-ID``, at any bridge."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s

    async def read_on(self, url: str, answer: Answer) -> None:
        """See :class:`Resume`."""
        body = SseText(answer)
        path = f"/v1/requests/{answer.request_id}/events"
        client = HttpClient(url)
        try:
            async with asyncio.timeout(self._stall_s) as limit:
                status = await client.get(
                    path, _renewing(limit, self._stall_s, body.on_body),
                    {"Last-Event-ID": answer.last_event_id, "x-mesh-event-ids": "1"},
                )  # fmt: skip
        finally:
            client.close()
        if status != 200 and status not in _RETRYABLE_STATUS:
            error = body.refusal()
            answer.fail(f"http_{status}", error.message)
        elif body.error is not None and body.error.code not in _RETRYABLE_CODES:
            answer.fail(str(body.error.code or body.error.type), body.error.message)


class BusResume:
    """Reads the stream of a bridge's request on the bus, from its first token.

    What the HTTP client had read must be how the whole begins; else both parts are kept, and the
    comparison shows it.

    Args:
        client: of a user who may read the streams of bridges.
        reader_of: the reader that a request was submitted with.
    """

    def __init__(self, client: MeshClient, reader_of: Callable[[str], str]) -> None:
        self._client = client
        self._reader_of = reader_of

    async def read_on(self, url: str, answer: Answer) -> None:
        """See :class:`Resume`."""
        whole = Answer(answer.num_choices)
        reader = self._reader_of(answer.request_id)
        try:
            async with self._client.resume(answer.request_id, reader=reader) as stream:
                async for delta in stream:
                    take_deltas(whole, [delta])
                    answer.event_s.append(whole.event_s[-1])
        except BusUnavailable as error:
            raise ConnectionError(error.message) from error
        except MeshError as error:
            answer.fail(error.code, error.message)
            return
        assert stream.end is not None, "complete"
        for index, text in enumerate(whole.texts):
            had = answer.texts[index]
            answer.texts[index] = text if text.startswith(had) else had + text
        answer.reasons = list(stream.end.finish_reasons)
        answer.complete(stream.end.usage, time.monotonic())


class SseClient:
    """``/v1/completions``, streamed, through any of ``urls``.

    A connection that breaks, or brings nothing for ``stall_s``, is left; the next server is asked
    for the rest. 429 and 503 are tried again, as the official client does.

    Args:
        is_mesh: send what only a mesh understands.
    """

    def __init__(
        self, urls: Sequence[str], model: str, resume: Resume, *, stall_s: float, is_mesh: bool
    ) -> None:
        self.urls = tuple(urls)
        self.stall_s = stall_s
        self._model = model
        self._resume = resume
        self._is_mesh = is_mesh
        self._turn = itertools.cycle(range(len(self.urls)))
        self.homes: dict[str, str] = {}  # label -> the server that it reads from
        self.not_coming_back: set[str] = set()  # labels: their requests end with the connection

    async def run(self, case: Case, label: str, answer: Answer) -> None:
        """See :class:`Client`."""
        at = next(self._turn)
        while not answer.has_ended:
            url = self.homes[label] = self.urls[at % len(self.urls)]
            try:
                if answer.request_id:
                    await self._resume.read_on(url, answer)
                else:
                    await self._post(url, case, label, answer)
            except (OSError, BadHttp, TimeoutError):
                pass  # the next server may do better
            except msgspec.DecodeError as error:
                answer.fail("bad_stream", str(error))
            if not answer.has_ended:
                answer.num_resumed += bool(answer.request_id)
                at += 1
                await asyncio.sleep(RETRY_S if answer.num_resumed > 1 else 0)

    async def _post(self, url: str, case: Case, label: str, answer: Answer) -> None:
        body, client = SseText(answer), HttpClient(url)
        headers = {"X-Request-Id": label}
        if self._is_mesh:
            headers["x-mesh-event-ids"] = "1"
            if label not in self.not_coming_back:
                headers["x-mesh-resume-window"] = RESUME_WINDOW_S
        try:
            async with asyncio.timeout(self.stall_s) as limit:
                status = await client.post(
                    _COMPLETIONS,
                    case.http_body(self._model, label, is_mesh=self._is_mesh),
                    _renewing(limit, self.stall_s, body.on_body),
                    headers,
                )
        finally:
            client.close()
        if status in _RETRYABLE_STATUS:
            await asyncio.sleep(RETRY_S)
        elif status != 200:
            answer.fail(f"http_{status}", body.refusal().message)
        elif body.error is not None and body.error.code not in _RETRYABLE_CODES:
            answer.fail(str(body.error.code or body.error.type), body.error.message)


def _renewing(
    limit: asyncio.Timeout, stall_s: float, on_body: Callable[[int, bytes], None]
) -> Callable[[int, bytes], None]:
    """``on_body``, and a limit that starts anew with each piece."""
    loop = asyncio.get_running_loop()

    def take(status: int, data: bytes) -> None:
        if not limit.expired():
            limit.reschedule(loop.time() + stall_s)
        on_body(status, data)

    return take
