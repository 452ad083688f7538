"""Questions that wait for their answer on this connection.

One inbox takes all answers; the last subject token says which question. A question fails at once,
not at its time-out, when the connection breaks or the broker forbids its subject.
"""

from __future__ import annotations

import asyncio
import itertools

from nats.aio.msg import Msg

from schemas.errors import MeshError

_NO_RESPONDERS = "503"


def status_of(message: Msg) -> str | None:
    """The status line of a message that the broker itself made, else None."""
    return message.headers.get("Status") if message.headers and not message.data else None


class PendingCalls:
    """Questions asked and not answered yet."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, subject: str) -> tuple[str, asyncio.Future[Msg]]:
        """The reply subject of a new question, and the future of its answer."""
        token = str(next(self._numbers))
        future = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject, future)
        return f"{self.inbox}.{token}", future

    def end(self, reply: str) -> None:
        """Stop waiting, answered or not."""
        self._waiting.pop(reply.rpartition(".")[2], None)

    def answer(self, message: Msg) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        _, future = self._waiting.get(message.subject.rpartition(".")[2], (None, None))
        if future is not None and not future.done():
            future.set_result(message)

    def fail_all(self, error: MeshError) -> None:
        """End every open question with ``error``."""
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def fail_subject(self, subject: str, error: MeshError) -> None:
        """End the open questions on ``subject``, compared without case (the parser lowers it)."""
        for asked, future in self._waiting.values():
            if asked.lower() == subject and not future.done():
                future.set_exception(error)


def has_no_responders(message: Msg) -> bool:
    """Nobody listens on the subject that was asked."""
    return status_of(message) == _NO_RESPONDERS
