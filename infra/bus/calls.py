"""Questions that wait for their answer on this connection.

One inbox takes all answers; the last subject token says which question. A question fails at once,
not at its time-out, when the connection breaks or the broker forbids its subject. A time-out is a
timer that fails the question: ``asyncio.timeout``, which cancels and catches that, costs five times
as much.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import NamedTuple

from infra.bus.wire import Msg
from schemas.errors import MeshError

_NO_RESPONDERS = "503"


def status_of(message: Msg) -> str | None:
    """The status line of a message that the broker itself made, else None."""
    if message.data or not message.headers:
        return None
    return message.headers.get("Status")


class _Call(NamedTuple):
    subject: str
    future: asyncio.Future[Msg]
    timer: asyncio.TimerHandle


class PendingCalls:
    """Questions asked and not answered yet."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._numbers = itertools.count()
        self._waiting: dict[str, _Call] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(
        self, subject: str, timeout_s: float, late: Callable[[], MeshError]
    ) -> tuple[str, asyncio.Future[Msg]]:
        """The reply subject of a new question, and the future of its answer, or of the error
        that ``late`` makes when there is none within ``timeout_s``."""
        token = str(next(self._numbers))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Msg] = loop.create_future()
        timer = loop.call_later(timeout_s, _fail, future, late)
        self._waiting[token] = _Call(subject, future, timer)
        return f"{self.inbox}.{token}", future

    def end(self, reply: str) -> None:
        """Stop waiting, answered or not."""
        call = self._waiting.pop(reply.rpartition(".")[2], None)
        if call is not None:
            call.timer.cancel()
            if not call.future.cancel() and not call.future.cancelled():
                call.future.exception()  # whoever asked may have been cancelled and never see it

    def answer(self, message: Msg) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        call = self._waiting.get(message.subject.rpartition(".")[2])
        if call is not None and not call.future.done():
            call.future.set_result(message)

    def fail_all(self, error: MeshError) -> None:
        """End every open question with ``error``."""
        for call in self._waiting.values():
            if not call.future.done():
                call.future.set_exception(error)

    def fail_subject(self, subject: str, error: MeshError) -> None:
        """End the open questions on ``subject``, compared without case (the parser lowers it)."""
        for call in self._waiting.values():
            if call.subject.lower() == subject and not call.future.done():
                call.future.set_exception(error)


def _fail(future: asyncio.Future[Msg], late: Callable[[], MeshError]) -> None:
    if not future.done():
        future.set_exception(late())


def has_no_responders(message: Msg) -> bool:
    """Nobody listens on the subject that was asked."""
    return status_of(message) == _NO_RESPONDERS
