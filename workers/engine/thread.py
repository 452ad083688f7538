"""The one thread that owns an engine, and how the event loop speaks to it.

::

    event loop                         engine thread
    call, ask, post   -- commands -->  run all commands, then one step, and again
    on_report(report) <-- reports ---  after each step that brought something

Both directions are bounded. The thread sleeps while there is nothing to do; the event loop never
waits for it except in an ``await``. While it sleeps, a call is made right where it comes
from, under the lock that the thread needs to wake: two changes of thread less.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import structlog

from schemas.errors import EngineFailed, QueueFull
from workers.engine.api import EngineApi, EngineRequest, StepReport

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_MAX_COMMANDS = 4096
_MAX_REPORTS = 64  # not yet handled by the loop; then the engine waits for its readers
_CHECK_AFTER_IDLE_S = 1.0  # the books are checked when nobody waits for the engine


class _Answer(NamedTuple):
    """What a call brought: its result, or the exception it raised."""

    future: asyncio.Future[Any]
    result: Any
    error: Exception | None


class EngineThread:
    """Runs an engine's steps, and functions that want the engine between two steps.

    Args:
        on_report: called on the event loop with each report that has something in it, in order.
        on_fatal: called on the event loop, once, when the engine itself broke: an exception out of
            ``step``, out of a posted function, or books that do not add up. The thread has ended
            then, and calls raise EngineFailed.
    """

    def __init__(
        self,
        engine: EngineApi,
        on_report: Callable[[StepReport], None],
        on_fatal: Callable[[Exception], None],
        *,
        check_after_idle_s: float = _CHECK_AFTER_IDLE_S,
    ) -> None:
        self._engine = engine
        self._on_report = on_report
        self._on_fatal = on_fatal
        self._check_after_idle_s = check_after_idle_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=False)
        self._condition = threading.Condition()
        self._commands: deque[tuple[Callable[[EngineApi], Any], asyncio.Future[Any] | None]] = (
            deque()
        )
        self._num_reported = 0  # handed to the loop; only the thread counts
        self._num_handled = 0  # of those; only the loop counts
        self._untold_s: list[float] = []  # steps that no report has told of
        self._is_checked = False  # the books, since the last call or step
        self._is_asleep = False  # in ``wait``: it has no hand in the engine
        self._is_stopping = False
        self._has_ended = False
        self._busy_since_s: float | None = None
        self.last_progress_s = time.monotonic()

    # ---- for the event loop --------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; to be called on the event loop that gets the reports."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Let the current step end, then end the thread. Calls that wait raise EngineFailed.

        Raises:
            TimeoutError: the step did not end in time; the thread ends after it.
        """
        with self._condition:
            self._is_stopping = True
            self._condition.notify_all()
        if self._thread.ident is None:
            return
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s} s")

    async def prepare(self, request: EngineRequest) -> None:
        """Do beforehand, on neither the loop's thread nor the engine's, what would make adding
        ``request`` take long.

        Raises:
            InvalidRequest: its ``response_format`` can't be kept.
        """
        if request.sampling.response_format is not None:
            await asyncio.to_thread(self._engine.prepare, request.sampling)

    async def call(self, function: Callable[[EngineApi], T], timeout_s: float | None = None) -> T:
        """``function(engine)`` between two steps, and what it returned or raised. It is to be
        quick: books, no computing.

        Give it a time-out, here or around it. Cancelled or late before it began, it never runs;
        later, its result is lost: what it took from the engine is to be released by a ``post``.

        Raises:
            TimeoutError: no answer within ``timeout_s``.
            QueueFull: too many wait already.
            EngineFailed: the engine broke or was stopped.
        """
        future = self.ask(function)
        if timeout_s is None or future.done():
            return await future
        timer = asyncio.get_running_loop().call_later(timeout_s, _give_up, future)
        try:
            return await future
        finally:
            timer.cancel()

    def ask(self, function: Callable[[EngineApi], T]) -> asyncio.Future[T]:
        """The same without waiting: what it returned or raised will be the future's. Whoever asks
        looks at that in any case, or cancels it.

        Raises:
            QueueFull, EngineFailed: not asked, as :meth:`call`.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._condition:
            if self._is_asleep and not self._commands and not self._is_stopping:
                _settle([_answer(future, function, self._engine)])  # it can't wake meanwhile
                self._is_checked = False
                self._condition.notify_all()
            else:
                self._enqueue(function, future)
        return future

    def post(self, function: Callable[[EngineApi], object]) -> None:
        """The same without an answer. An exception in it is fatal to the engine.

        Raises:
            QueueFull: too many wait already.
            EngineFailed: the engine broke or was stopped.
        """
        self._enqueue(function, None)

    def release(self, key: str) -> None:
        """Have the engine give back whatever ``key`` holds, after what was asked of it before.
        From any thread; an engine that has stopped holds nothing any more.

        Raises:
            QueueFull: too many calls wait already.
        """

        def release(engine: EngineApi) -> None:
            engine.release(key)

        with contextlib.suppress(EngineFailed):
            self.post(release)

    def is_stuck(self, after_s: float) -> bool:
        """Whether it has been busy for ``after_s`` seconds without finishing anything."""
        busy_since_s = self._busy_since_s
        return busy_since_s is not None and time.monotonic() - busy_since_s > after_s

    def _enqueue(
        self, function: Callable[[EngineApi], Any], future: asyncio.Future[Any] | None
    ) -> None:
        with self._condition:
            if self._has_ended or self._is_stopping:
                raise EngineFailed("the engine has stopped")
            if len(self._commands) >= _MAX_COMMANDS:
                raise QueueFull("too many calls wait for the engine")
            self._commands.append((function, future))
            self._condition.notify_all()

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._busy_since_s = time.monotonic()
                self._run_commands()
                if self._engine.has_work():
                    self._busy_since_s = started_s = time.monotonic()
                    report = self._engine.step()
                    self._untold_s.append(time.monotonic() - started_s)
                    self._hand_over(report)
                self.last_progress_s = time.monotonic()
                self._busy_since_s = None
        except Exception as error:
            _log.error("engine_broke", exc_info=True)
            self._end()
            self._tell_loop(self._on_fatal, error)
        finally:
            self._busy_since_s = None
            self._end()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False: stop."""
        self._is_checked = False
        while not (self._is_stopping or self._has_something()):
            if not self._sleep():
                self._engine.check_invariants()
                self._is_checked = True
        return not self._is_stopping

    def _has_something(self) -> bool:
        has_room = self._num_reported - self._num_handled < _MAX_REPORTS
        return bool(self._commands) or (has_room and self._engine.has_work())

    def _sleep(self) -> bool:
        """Until somebody calls; False: nobody did, and it is time to check the books. Who has a
        word for the thread says it first and then looks whether it sleeps; so it looks once more
        when it is about to."""
        timeout_s = None if self._is_checked else self._check_after_idle_s
        with self._condition:
            self._is_asleep = True
            try:
                is_awake = self._is_stopping or self._has_something()
                return is_awake or self._condition.wait(timeout_s)
            finally:
                self._is_asleep = False

    def _run_commands(self) -> None:
        """Those that are here now; what comes meanwhile waits for the next step. The loop hears
        of all of them at once."""
        answers: list[_Answer] = []
        try:
            for _ in range(len(self._commands)):
                function, future = self._commands.popleft()
                if future is None:
                    function(self._engine)
                elif not future.done():  # nobody waits for it any more
                    answers.append(_answer(future, function, self._engine))
        finally:
            if answers:
                self._tell_loop(_settle, answers)

    def _hand_over(self, report: StepReport) -> None:
        if report.is_silent:
            return
        report.steps_s, self._untold_s = self._untold_s, []
        self._num_reported += 1
        self._tell_loop(self._handle_report, report)

    def _handle_report(self, report: StepReport) -> None:
        """On the event loop."""
        try:
            self._on_report(report)
        finally:
            self._num_handled += 1
            if self._is_asleep:  # it may have waited for that
                with self._condition:
                    self._condition.notify_all()

    def _tell_loop(self, function: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None, "start comes first"
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:  # the loop is closed: nobody is left to tell, and nothing to do
            _log.warning("event_loop_closed")
            with self._condition:
                self._is_stopping = True

    def _end(self) -> None:
        with self._condition:
            self._has_ended = True
            commands = list(self._commands)
            self._commands.clear()
        stopped = EngineFailed("the engine has stopped")
        answers = [_Answer(future, None, stopped) for _, future in commands if future is not None]
        if answers:
            self._tell_loop(_settle, answers)


def _answer(
    future: asyncio.Future[Any], function: Callable[[EngineApi], Any], engine: EngineApi
) -> _Answer:
    try:
        return _Answer(future, function(engine), None)
    except Exception as error:
        return _Answer(future, None, error)


def _settle(answers: list[_Answer]) -> None:
    """On the event loop."""
    for future, result, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _give_up(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())
