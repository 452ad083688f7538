"""Reads the streamed answer of an OpenAI-compatible server, event by event, at little cost."""

from __future__ import annotations

import time

import msgspec

from loadgen.measure import RequestResult
from schemas.errors import MeshError
from schemas.tokens import Usage

MAX_LINE_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16


class BadStream(MeshError):
    """The body is no event stream of an OpenAI-compatible server."""

    code = "bad_stream"


class _Delta(msgspec.Struct, gc=False):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether tokens came with it.

        A first event that only names the role, and a last one that only says why it ended, bring
        none; an empty text in between does (half a character, say).
        """
        texts: tuple[str | None, ...] = (self.text,)
        role = None
        if self.delta is not None:
            texts = (self.delta.content, self.delta.reasoning_content)
            role = self.delta.role
        return any(texts) or ("" in texts and role is None and self.finish_reason is None)


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct, gc=False):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class _ErrorBody(msgspec.Struct, gc=False):
    error: _Error | str


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode


class SseAnswer:
    """One answer. Give it the body as it comes (:meth:`on_body`), then call :meth:`finish`."""

    def __init__(self, result: RequestResult) -> None:
        self._result = result
        self._rest = bytearray()  # an unfinished line, or the body of an error
        self._usage: Usage | None = None
        self._error: _Error | None = None
        self._is_done = False

    def on_body(self, status: int, data: bytes) -> None:
        """A piece of the body. Its token events get the time of this call.

        Raises:
            BadStream: no event stream, or a line longer than a megabyte.
        """
        if status != 200:
            self._rest += data[: MAX_ERROR_BYTES - len(self._rest)]
            return
        now_s = time.monotonic()
        lines = (bytes(self._rest) + data if self._rest else data).split(b"\n")
        self._rest[:] = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise BadStream("a line is longer than a megabyte")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip(), now_s)

    def finish(self, status: int) -> None:
        """The body is over: complete or fail the result."""
        if status != 200:
            error = _parse_error(bytes(self._rest))
            self._result.fail(f"http_{status}", error.message)
        elif self._error is not None:
            code = self._error.code or self._error.type
            self._result.fail(str(code or "stream_error"), self._error.message)
        elif not self._is_done:
            self._result.fail("stream_broken", "the stream ended without [DONE]")
        else:
            self._result.complete(self._usage, is_count_exact=False)

    def _on_event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._is_done = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            raise BadStream(f"an event is no completion chunk: {error}") from error
        for choice in event.choices:
            self._on_choice(choice, now_s)
        if event.usage is not None:
            self._usage = _convert_usage(event.usage)
        if event.error is not None:
            self._error = _as_error(event.error)

    def _on_choice(self, choice: _Choice, now_s: float) -> None:
        # An answer whose tokens have no text at all (special ones) shows itself by its end only.
        is_only_sign = choice.finish_reason is not None and not self._result.event_s
        if choice.has_token or is_only_sign:
            self._result.add_event(now_s)
        if choice.finish_reason is not None:
            self._result.end_s = now_s


def _convert_usage(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
    )


def _as_error(error: _Error | str) -> _Error:
    return _Error(message=error) if isinstance(error, str) else error


def _parse_error(body: bytes) -> _Error:
    """The error that ``body`` tells in OpenAI's form, or its first characters."""
    try:
        return _as_error(_decode_error(body).error)
    except msgspec.DecodeError:
        return _Error(message=body[:200].decode(errors="replace"))
