"""Simulated engines that share the event loop: hundreds of threads would starve it.

A step of a simulated engine computes for a tenth of a millisecond and then waits for what it is
said to cost. A thread per engine is fine for a few. With a hundred of them that are busy, the loop
gets a hundredth of the interpreter: beats stop, and all workers of the process are given up. Here a
step is computed on the loop at its beginning, and its report is kept until its end::

    begin            end = begin + cost           begin of the next = that end
    | compute ~0.1 ms | ... commands wait ...     | report, commands, next step

A step that follows another begins when that one should have ended, not when the loop came to it: a
busy machine delays reports, but adds nothing to how long a chain of steps takes. Only what it is
behind by more than ``_CARRIED_S`` is lost, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from schemas.errors import EngineFailed, QueueFull
from workers.engine.api import EngineApi, StepReport
from workers.engine.simulated import StepClock
from workers.engine.thread import EngineThread

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_CARRIED_S = 0.02
_MAX_COMMANDS = 4096
_CHECK_AFTER_IDLE_S = 1.0
_CHECKS_SHARE = 0.02  # of a crew's time: the books of a large pool take 40 ms to look at


class NotedClock(StepClock):
    """Waits for nothing: keeps when a step began and when it ends, for whoever waits instead."""

    def __init__(self) -> None:
        self.begins_s = self.ends_s = time.monotonic()

    def begin(self) -> float:
        """When this step began."""
        return self.begins_s

    def end(self, end_s: float) -> None:
        """When it ends; not before now, if computing took longer."""
        self.ends_s = max(end_s, self.begins_s)

    def read(self) -> float:
        """The engine's own time: stands still but for its steps."""
        return self.ends_s


class BookChecks:
    """Whose books may be looked at now: engines that share a loop take turns."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def may_begin(self, now_s: float) -> bool:
        """Whether there is time for it."""
        return now_s >= self._next_s

    def took(self, seconds: float, now_s: float) -> None:
        """One has been looked at: no other for so long that the share is kept."""
        self._next_s = now_s + seconds / _CHECKS_SHARE


class StepsOnLoop(EngineThread):
    """Keeps what :class:`EngineThread` promises, without a thread.

    Args:
        clock: of the engine's runner.
        checks: of all engines of this loop.
        check_after_idle_s: an engine that rested for so long has its books looked at, in its turn.

    Attributes:
        late_s: how much later steps began, in all, than they could have: what a busy machine took
            from this engine.
    """

    def __init__(
        self,
        engine: EngineApi,
        on_report: Callable[[StepReport], None],
        on_fatal: Callable[[Exception], None],
        *,
        clock: NotedClock,
        checks: BookChecks,
        check_after_idle_s: float = _CHECK_AFTER_IDLE_S,
    ) -> None:
        super().__init__(engine, on_report, on_fatal, check_after_idle_s=check_after_idle_s)
        self.late_s = 0.0
        self._clock = clock
        self._checks = checks
        self._owner = threading.get_ident()
        self._is_turn_due = False
        self._check: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None  # of the step under way
        self._report: StepReport | None = None  # its

    # ---- for the event loop ----------------------------------------------------------------

    def start(self) -> None:
        """Steps are made from now on, on the loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()
        self._turn_soon()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Make no more steps; the one under way is not reported. Calls that wait raise
        EngineFailed."""
        self._is_stopping = True
        for timer in (self._ending, self._check):
            if timer is not None:
                timer.cancel()
        self._fail_waiting()

    def ask(self, function: Callable[[EngineApi], T]) -> asyncio.Future[T]:
        """See :class:`EngineThread`."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._report is None and not self._commands and not self._is_over:
            self._run_command(function, future)
            self._turn_soon()
        else:
            self._enqueue(function, future)
        return future

    def _enqueue(
        self, function: Callable[[EngineApi], Any], future: asyncio.Future[Any] | None
    ) -> None:
        if self._is_over:
            raise EngineFailed("the engine has stopped")
        if len(self._commands) >= _MAX_COMMANDS:
            raise QueueFull("too many calls wait for the engine")
        self._commands.append((function, future))
        if threading.get_ident() == self._owner:
            self._turn_soon()
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is held any more
                self._loop.call_soon_threadsafe(self._turn_soon)

    @property
    def _is_over(self) -> bool:
        return self._is_stopping or self._has_ended

    # ---- steps -----------------------------------------------------------------------------

    def _turn_soon(self) -> None:
        if self._loop is None or self._is_turn_due or self._report is not None or self._is_over:
            return
        self._is_turn_due = True
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """What waits, then a step, unless one is under way."""
        self._is_turn_due = False
        if self._report is None and not self._is_over:
            self._go_on(time.monotonic())

    def _go_on(self, begins_s: float) -> None:
        """Commands, and the step that may begin at ``begins_s``."""
        try:
            while self._commands:
                self._run_command(*self._commands.popleft())
            if self._engine.has_work():
                self._begin(begins_s)
            else:
                self._rest()
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """The engine itself broke: nothing is done any more."""
        _log.error("engine_broke", exc_info=error)
        self._has_ended = True
        self._fail_waiting()
        self._on_fatal(error)

    def _run_command(
        self, function: Callable[[EngineApi], Any], future: asyncio.Future[Any] | None
    ) -> None:
        self._is_checked = False
        if future is None:
            function(self._engine)
        elif not future.done():  # else nobody waits for it any more
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

    def _begin(self, begins_s: float) -> None:
        assert self._loop is not None, "start comes first"
        self._clock.begins_s = self._clock.ends_s = begins_s
        self._busy_since_s = time.monotonic()
        self._is_checked = False
        self._report = self._engine.step()
        self._untold_s.append(self._clock.ends_s - begins_s)
        left_s = max(0.0, self._clock.ends_s - time.monotonic())
        self._ending = self._loop.call_later(left_s, self._finish)

    def _finish(self) -> None:
        """The step is over: say what it brought, and go on from its end."""
        report, self._report, self._ending = self._report, None, None
        assert report is not None, "a step is under way"
        now_s = self.last_progress_s = time.monotonic()
        self._busy_since_s = None
        if not report.is_silent:
            report.steps_s, self._untold_s = self._untold_s, []
            self._on_report(report)
        begins_s = self._clock.ends_s
        if now_s - begins_s > _CARRIED_S:
            self.late_s += now_s - _CARRIED_S - begins_s
            begins_s = now_s - _CARRIED_S
        self._go_on(begins_s)

    def _rest(self) -> None:
        """Nothing to do: look at the books once it has been so for a while."""
        assert self._loop is not None, "start comes first"
        if self._is_checked or self._check is not None:
            return
        self._check = self._loop.call_later(self._check_after_idle_s, self._check_books)

    def _check_books(self) -> None:
        self._check = None
        if self._report is not None or self._is_over or self._engine.has_work():
            return
        began_s = time.monotonic()
        if not self._checks.may_begin(began_s):
            self._rest()
            return
        try:
            self._engine.check_invariants()
        except AssertionError as error:
            self._break(error)
            return
        self._is_checked = True
        ended_s = time.monotonic()
        self._checks.took(ended_s - began_s, ended_s)

    def _fail_waiting(self) -> None:
        while self._commands:
            _, future = self._commands.popleft()
            if future is not None and not future.done():
                future.set_exception(EngineFailed("the engine has stopped"))
