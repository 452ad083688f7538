from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from schemas.errors import EngineFailed, NoCapacity, QueueFull
from tests.workers.engine.simulated_engines import (
    StrictRunner,
    expected_answer,
    make_engine,
    request_of,
    tokens_of,
)
from workers.engine.api import EngineApi, StepReport
from workers.engine.engine import Engine
from workers.engine.thread import EngineThread

TIMEOUT_S = 60.0


class Listener:
    """Collects what the thread tells the event loop, and lets a test wait for it."""

    def __init__(self) -> None:
        self.total = StepReport()
        self.fatal: list[Exception] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Event()

    def on_report(self, report: StepReport) -> None:
        self.threads.add(threading.get_ident())
        self.total.outputs += report.outputs
        self.total.finished += report.finished
        self.total.steps_s += report.steps_s
        self._changed.set()

    def on_fatal(self, error: Exception) -> None:
        self.fatal.append(error)
        self._changed.set()

    async def wait_for(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def running(engine: Engine, **options: float) -> AsyncIterator[tuple[EngineThread, Listener]]:
    listener = Listener()
    thread = EngineThread(engine, listener.on_report, listener.on_fatal, **options)
    thread.start()
    try:
        yield thread, listener
    finally:
        await thread.stop(TIMEOUT_S)


async def call(thread: EngineThread, function: Callable[[EngineApi], Any]) -> Any:
    async with asyncio.timeout(TIMEOUT_S):
        return await thread.call(function)


async def test_requests_run_and_reports_arrive_on_the_loop() -> None:
    """Add by call, get every report in order on the event loop's own thread."""
    async with running(make_engine()) as (thread, listener):
        request = request_of("a")
        await call(thread, lambda engine: engine.add(request))
        await listener.wait_for(lambda: listener.total.finished)
        answer, _ = expected_answer(request.prompt_ids, request.sampling)
        assert tokens_of(listener.total, "a") == answer
        assert listener.threads == {threading.get_ident()}


async def test_every_step_is_timed_also_those_that_report_nothing() -> None:
    """A prompt in three chunks has two silent steps: the report of the third tells of all."""
    async with running(make_engine(max_batch_tokens=8)) as (thread, listener):
        request = request_of("a", tuple(range(10, 30)))
        await call(thread, lambda engine: engine.add(request))
        await listener.wait_for(lambda: listener.total.finished)
        num_tokens = len(tokens_of(listener.total, "a"))
        assert len(listener.total.steps_s) == 2 + num_tokens
        assert min(listener.total.steps_s) > 0


async def test_a_call_returns_what_the_function_returned_or_raised() -> None:
    """Results and errors come back to the caller; the engine goes on after an error."""
    async with running(make_engine(4)) as (thread, listener):
        assert len(await call(thread, lambda engine: engine.reserve("a", 8))) == 2
        with pytest.raises(NoCapacity):
            await call(thread, lambda engine: engine.reserve("b", 100))
        thread.post(lambda engine: engine.release("a"))
        assert (await call(thread, lambda engine: engine.load())).num_free_blocks == 4
        assert not listener.fatal


async def test_steps_run_on_a_thread_of_their_own_and_alone() -> None:
    """One thread, not the event loop's, makes every step; a call never falls into one, whether the
    thread makes it between two steps or the caller while the thread sleeps."""
    threads: set[int] = set()
    callers: set[int] = set()
    inside = [0]
    overlaps = []

    class Runner(StrictRunner):
        def execute(self, batch: Any) -> Any:
            threads.add(threading.get_ident())
            inside[0] += 1
            try:
                time.sleep(0.0002)  # lets others run, as a model's kernels do
                return super().execute(batch)
            finally:
                inside[0] -= 1

    def look(_: EngineApi) -> None:
        callers.add(threading.get_ident())
        overlaps.append(inside[0])

    async with running(make_engine(runner_class=Runner)) as (thread, listener):
        for number in range(40):
            request = request_of(f"r{number}", max_tokens=3)
            await call(thread, lambda engine, r=request: engine.add(r))
            for _ in range(number % 4):
                await call(thread, look)
        await listener.wait_for(lambda: len(listener.total.finished) == 40)
        async with asyncio.timeout(TIMEOUT_S):
            while threading.get_ident() not in callers:  # until it has gone to sleep
                await call(thread, look)
                await asyncio.sleep(0.001)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert callers <= threads | {threading.get_ident()}
    assert not any(overlaps)


class Gate(StrictRunner):
    """A runner that waits inside a step until it is let on."""

    entered: threading.Event
    opened: threading.Event

    def execute(self, batch: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S)
        return super().execute(batch)


@asynccontextmanager
async def stopped_in_a_step() -> AsyncIterator[tuple[EngineThread, Listener, type[Gate]]]:
    gate = type("ThisGate", (Gate,), {"entered": threading.Event(), "opened": threading.Event()})
    async with running(make_engine(runner_class=gate)) as (thread, listener):
        try:
            await call(thread, lambda engine: engine.add(request_of("a")))
            assert await asyncio.to_thread(gate.entered.wait, TIMEOUT_S)
            yield thread, listener, gate
        finally:
            gate.opened.set()


async def test_a_step_that_hangs_is_told_from_an_idle_engine() -> None:
    """Readiness: stuck means busy without finishing a step; idle is not stuck."""
    async with stopped_in_a_step() as (thread, listener, gate):
        before_s = thread.last_progress_s
        assert thread.is_stuck(after_s=0.0)
        assert not thread.is_stuck(after_s=60.0)
        gate.opened.set()
        await listener.wait_for(lambda: listener.total.finished)
        await call(thread, lambda engine: None)
        assert thread.last_progress_s > before_s


async def test_a_cancelled_call_never_runs() -> None:
    """A caller that gave up before its turn leaves nothing behind."""
    async with stopped_in_a_step() as (thread, _, gate):
        ran: list[str] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await thread.call(lambda _: ran.append("late"))
        gate.opened.set()
        await call(thread, lambda _: ran.append("next"))
        assert ran == ["next"]


async def test_a_call_that_is_late_never_runs() -> None:
    """The same with a time-out of the call's own; one that is not late is not disturbed by it."""
    async with stopped_in_a_step() as (thread, _, gate):
        ran: list[str] = []
        with pytest.raises(TimeoutError):
            await thread.call(lambda _: ran.append("late"), 0.01)
        gate.opened.set()
        await thread.call(lambda _: ran.append("next"), TIMEOUT_S)
        assert ran == ["next"]


async def test_the_queue_of_calls_is_bounded() -> None:
    """An engine that does not keep up says so; it does not collect calls for ever."""
    async with stopped_in_a_step() as (thread, _, _gate):
        with pytest.raises(QueueFull):
            _post_often(thread, 10_000)


def _post_often(thread: EngineThread, count: int) -> None:
    for _ in range(count):
        thread.post(lambda _: None)


async def test_the_engine_waits_for_a_slow_event_loop() -> None:
    """Reports are bounded too: with the loop blocked, the engine makes 64 steps and no more."""
    is_full, is_over = threading.Event(), threading.Event()

    class Runner(StrictRunner):
        num_steps = 0

        def execute(self, batch: Any) -> Any:
            Runner.num_steps += 1
            if Runner.num_steps == 64:
                is_full.set()
            if Runner.num_steps > 64:
                is_over.set()
            return super().execute(batch)

    async with running(make_engine(512, runner_class=Runner)) as (thread, listener):
        request = request_of("a", (3,), max_tokens=90, ignore_eos=True)
        thread.post(lambda engine: engine.add(request))
        assert is_full.wait(TIMEOUT_S)  # on purpose on the event loop: it is the slow one
        assert not is_over.wait(0.05)
        await listener.wait_for(lambda: listener.total.finished)
        assert is_over.is_set()


async def test_an_engine_that_breaks_is_reported() -> None:
    """An exception out of the engine ends the thread, reaches on_fatal once, and fails calls that
    wait and calls that come later."""
    engine = make_engine()

    def breaks() -> StepReport:
        raise RuntimeError("broken books")

    async with running(engine) as (thread, listener):
        await call(thread, lambda engine: setattr(engine, "step", breaks))
        thread.post(lambda engine: engine.add(request_of("a")))
        await listener.wait_for(lambda: listener.fatal)
        assert [str(error) for error in listener.fatal] == ["broken books"]
        with pytest.raises(EngineFailed):
            await call(thread, lambda engine: engine.load())


async def test_a_posted_function_that_raises_is_not_lost() -> None:
    """Nobody waits for a post, so its exception is fatal; calls behind it fail at once."""
    async with stopped_in_a_step() as (thread, listener, gate):
        thread.post(lambda _: 1 / 0)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_fails(thread))
            await asyncio.sleep(0)  # let it join the queue
            gate.opened.set()
        assert isinstance(waiting.result(), EngineFailed)
        await listener.wait_for(lambda: listener.fatal)
        assert isinstance(listener.fatal[0], ZeroDivisionError)


async def _fails(thread: EngineThread) -> Exception | None:
    try:
        await call(thread, lambda engine: engine.load())
    except EngineFailed as error:
        return error
    return None


async def test_the_books_are_checked_when_idle() -> None:
    """Wrong books are found while nobody waits, not when a request meets them."""
    async with running(make_engine(), check_after_idle_s=0.01) as (thread, listener):
        await call(thread, lambda engine: engine.blocks.allocate(1))  # type: ignore[attr-defined]
        await listener.wait_for(lambda: listener.fatal)
        assert isinstance(listener.fatal[0], AssertionError)


async def test_stop_ends_the_thread_and_refuses_calls() -> None:
    """After stop no thread is left, and a late call gets an error instead of waiting for ever."""
    async with running(make_engine()) as (thread, _):
        await thread.stop(TIMEOUT_S)
        assert not any(t.name == "engine" for t in threading.enumerate())
        with pytest.raises(EngineFailed):
            await call(thread, lambda engine: engine.load())
        await thread.stop(TIMEOUT_S)


async def test_stop_waits_no_longer_than_it_is_told() -> None:
    """A step that hangs makes stop raise TimeoutError; the thread ends when the step does."""
    async with stopped_in_a_step() as (thread, _, _gate):
        with pytest.raises(TimeoutError):
            await thread.stop(0.01)
