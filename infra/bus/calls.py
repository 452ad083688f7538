"""Questions that wait for their answer on this connection.

One inbox takes all answers; the last subject token says which question. A question fails at once,
not at its time-out, when the connection breaks or the broker forbids its subject. There is one
timer for all: it rings when the first of them may be late, which by then is mostly answered.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable

from infra.bus.wire import Msg
from schemas.errors import MeshError

_NO_RESPONDERS = "503"
_EARLY_S = 0.001  # a loop's clock and its timers may differ by so much


def status_of(message: Msg) -> str | None:
    """The status line of a message that the broker itself made, else None."""
    if message.data or not message.headers:
        return None
    return message.headers.get("Status")


class Call:
    """One question: ``reply`` is where its answer comes to, ``future`` the answer, or the error
    that stands for it."""

    __slots__ = ("due_s", "future", "reply", "subject", "timeout_s")

    def __init__(
        self, subject: str, reply: str, future: asyncio.Future[Msg], due_s: float, timeout_s: float
    ) -> None:
        self.subject = subject
        self.reply = reply
        self.future = future
        self.due_s = due_s
        self.timeout_s = timeout_s


class PendingCalls:
    """Questions asked and not answered yet.

    Args:
        late: makes the error of a question that had no answer in its time.
    """

    def __init__(self, inbox: str, late: Callable[[Call], MeshError]) -> None:
        self.inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._late = late
        self._numbers = itertools.count()
        self._waiting: dict[str, Call] = {}  # by reply subject
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = math.inf

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, subject: str, timeout_s: float) -> Call:
        """A new question, which waits ``timeout_s`` at most. Whoever does not await it to its end
        must :meth:`give_up`."""
        due_s = self._loop.time() + timeout_s
        reply = f"{self.inbox}.{next(self._numbers)}"
        call = Call(subject, reply, self._loop.create_future(), due_s, timeout_s)
        self._waiting[reply] = call
        if due_s < self._rings_s:
            self._ring_at(due_s)
        return call

    def give_up(self, call: Call) -> None:
        """Nobody awaits this question any more, answered or not."""
        self._waiting.pop(call.reply, None)
        if not call.future.cancel() and not call.future.cancelled():
            call.future.exception()  # whoever asked may have been cancelled and never see it

    def answer(self, message: Msg) -> None:
        """Take an answer; one that nobody waits for any more is dropped."""
        call = self._waiting.pop(message.subject, None)
        if call is not None and not call.future.done():
            call.future.set_result(message)

    def fail_all(self, error: MeshError) -> None:
        """End every open question with ``error``."""
        self._fail(list(self._waiting.values()), lambda _: error)

    def fail_subject(self, subject: str, error: MeshError) -> None:
        """End the open questions on ``subject``, compared without case (the parser lowers it)."""
        found = [call for call in self._waiting.values() if call.subject.lower() == subject]
        self._fail(found, lambda _: error)

    def _fail(self, calls: list[Call], error_of: Callable[[Call], MeshError]) -> None:
        for call in calls:
            del self._waiting[call.reply]
            if not call.future.done():
                call.future.set_exception(error_of(call))

    def _ring_at(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_s = due_s
        self._timer = self._loop.call_at(due_s, self._look)

    def _look(self) -> None:
        """Fail who is late, and see who may be next."""
        self._timer, self._rings_s = None, math.inf
        now_s = self._loop.time() + _EARLY_S
        self._fail([call for call in self._waiting.values() if call.due_s <= now_s], self._late)
        if self._waiting:
            self._ring_at(min(call.due_s for call in self._waiting.values()))


def has_no_responders(message: Msg) -> bool:
    """Nobody listens on the subject that was asked."""
    return status_of(message) == _NO_RESPONDERS
