"""The text of a streamed answer of ``/v1/completions``, event by event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from loadgen.chaos.answer import Answer
from schemas.tokens import Usage

RETRYABLE_STATUS = (429, 503)
_RETRYABLE_CODES = ("shutting_down",)  # of error events: the bridge goes, the request stays


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

    def judge(self, status: int) -> None:
        """The connection is over: fail the answer, unless another server may do better."""
        if status in RETRYABLE_STATUS:
            return
        if status != 200:
            self._answer.fail(f"http_{status}", self.refusal().message)
        elif self.error is not None and self.error.code not in _RETRYABLE_CODES:
            self._answer.fail(str(self.error.code or self.error.type), self.error.message)

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


def renewing(
    limit: asyncio.Timeout, stall_s: float, on_body: Callable[[int, bytes], None]
) -> Callable[[int, bytes], None]:
    """``on_body``, and a limit that starts anew with each piece."""
    loop = asyncio.get_running_loop()

    def take(status: int, data: bytes) -> None:
        if not limit.expired():
            limit.reschedule(loop.time() + stall_s)
        on_body(status, data)

    return take
