"""Engines that share the event loop keep what those with a thread promise."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from pipeline.cost_model import FREE
from schemas.errors import EngineFailed, NoCapacity, QueueFull
from schemas.profiles import StepCosts
from tests.workers.engine.simulated_engines import (
    StrictRunner,
    expected_answer,
    make_engine,
    request_of,
    tokens_of,
)
from workers.crew.steps import BookChecks, NotedClock, StepsOnLoop
from workers.engine.api import StepReport
from workers.engine.engine import Engine

TIMEOUT_S = 60.0
MS = StepCosts(
    prefill_base_ms=4.0,
    prefill_token_ms=0.5,
    prefill_square_ms=0.0,
    decode_base_ms=2.0,
    decode_context_ms=0.0,
    decode_sequence_ms=0.0,
)
HOUR = StepCosts(
    prefill_base_ms=3.6e6,
    prefill_token_ms=0.0,
    prefill_square_ms=0.0,
    decode_base_ms=3.6e6,
    decode_context_ms=0.0,
    decode_sequence_ms=0.0,
)


class Noted(NotedClock):
    """Keeps all begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[float, float]] = []

    def end(self, end_s: float) -> None:
        super().end(end_s)
        self.spans.append((self.begins_s, self.ends_s))


class Driven:
    """An engine on the loop, and what it told."""

    def __init__(self, costs: StepCosts, *, check_after_idle_s: float = 3600.0) -> None:
        self.clock = clock = Noted()
        self.total = StepReport()
        self.fatal: list[Exception] = []
        self._changed = asyncio.Event()

        class Runner(StrictRunner):
            def __init__(self, *args: Any) -> None:
                pool, info, token_ids, _ = args
                super().__init__(pool, info, token_ids, costs, clock)

        self.engine: Engine = make_engine(runner_class=Runner)
        self.steps = StepsOnLoop(
            self.engine,
            self._on_report,
            self._on_fatal,
            clock=clock,
            checks=BookChecks(),
            check_after_idle_s=check_after_idle_s,
        )

    def _on_report(self, report: StepReport) -> None:
        self.total.outputs += report.outputs
        self.total.finished += report.finished
        self.total.steps_s += report.steps_s
        self._changed.set()

    def _on_fatal(self, error: Exception) -> None:
        self.fatal.append(error)
        self._changed.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def add(self, key: str, **fields: Any) -> None:
        request = request_of(key, **fields)
        await self.steps.call(lambda engine: engine.add(request), TIMEOUT_S)


@asynccontextmanager
async def driven(costs: StepCosts = FREE, **options: float) -> AsyncIterator[Driven]:
    made = Driven(costs, **options)
    made.steps.start()
    try:
        yield made
    finally:
        await made.steps.stop()
        made.engine.pool.close()


@asynccontextmanager
async def in_a_step() -> AsyncIterator[Driven]:
    """One whose step takes an hour."""
    async with driven(HOUR) as made:
        await made.add("a")
        async with asyncio.timeout(TIMEOUT_S):
            while not made.clock.spans:
                await asyncio.sleep(0)
        yield made


async def test_requests_run_on_the_loop_without_a_thread() -> None:
    """Answers are those of any other engine; nothing but the loop's thread takes part."""
    before = threading.active_count()
    async with driven() as made:
        for key in ("a", "b"):
            await made.add(key)
        await made.until(lambda: len(made.total.finished) == 2)
        assert threading.active_count() == before
        request = request_of("a")
        answer, _ = expected_answer(request.prompt_ids, request.sampling)
        assert tokens_of(made.total, "a") == tokens_of(made.total, "b") == answer


async def test_steps_take_what_they_cost_and_follow_each_other() -> None:
    """However busy the machine: a step begins at the end of the one before, but for what is told
    as late."""
    async with driven(MS) as made:
        await made.add("a", max_tokens=8, ignore_eos=True)
        await made.until(lambda: made.total.finished)
        spans = made.clock.spans
        assert [end - begin for begin, end in spans] == pytest.approx([0.0065] + [0.002] * 7)
        assert made.total.steps_s == pytest.approx([end - begin for begin, end in spans])
        gaps = [after[0] - before[1] for before, after in pairwise(spans)]
        assert min(gaps) >= 0
        assert sum(gaps) <= made.steps.late_s + 1e-9


async def test_what_is_asked_in_a_step_waits_for_its_end() -> None:
    """A caller that gave up before its turn leaves nothing behind."""
    async with in_a_step() as made:
        ran: list[str] = []
        with pytest.raises(TimeoutError):
            await made.steps.call(lambda _: ran.append("late"), 0.01)
        assert not ran
        assert made.steps.is_stuck(after_s=0.0)
        assert not made.steps.is_stuck(after_s=60.0)


async def test_a_call_returns_what_the_function_returned_or_raised() -> None:
    """Between steps and at rest alike; the engine goes on after an error."""
    async with driven(MS) as made:
        assert await made.steps.call(lambda _: 7) == 7
        with pytest.raises(NoCapacity):
            await made.steps.call(lambda engine: engine.reserve("b", 10_000))
        await made.add("a", max_tokens=4, ignore_eos=True)
        with pytest.raises(NoCapacity):
            await made.steps.call(lambda engine: engine.reserve("c", 10_000))
        await made.until(lambda: made.total.finished)
        assert not made.fatal


async def test_a_release_may_come_from_any_thread() -> None:
    """As from those that copy blocks."""
    async with driven() as made:
        assert await made.steps.call(lambda engine: engine.reserve("r", 8))
        await asyncio.to_thread(made.steps.release, "r")
        async with asyncio.timeout(TIMEOUT_S):
            while (await made.steps.call(lambda engine: engine.load())).num_free_blocks < 64:
                await asyncio.sleep(0)


async def test_the_queue_of_calls_is_bounded() -> None:
    """An engine that does not keep up says so."""
    async with in_a_step() as made:
        with pytest.raises(QueueFull):
            post_often(made.steps, 10_000)


def post_often(steps: StepsOnLoop, count: int) -> None:
    for _ in range(count):
        steps.post(lambda _: None)


async def test_stop_ends_what_waits_and_refuses_the_rest() -> None:
    """Also in the middle of a step. Twice is fine."""
    async with in_a_step() as made, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(fails(made.steps))
        async with asyncio.timeout(TIMEOUT_S):
            while not made.steps._commands:
                await asyncio.sleep(0)
        await made.steps.stop()
        assert isinstance(await waiting, EngineFailed)
        assert isinstance(await fails(made.steps), EngineFailed)
        made.steps.release("a")  # holds nothing any more


async def fails(steps: StepsOnLoop) -> Exception | None:
    try:
        await steps.call(lambda engine: engine.load(), TIMEOUT_S)
    except EngineFailed as error:
        return error
    return None


async def test_an_engine_that_breaks_is_reported_once() -> None:
    """Whether in a step or in what was posted, for which nobody waits."""

    def breaks() -> StepReport:
        raise RuntimeError("broken books")

    async with driven() as made:
        await made.steps.call(lambda engine: setattr(engine, "step", breaks))
        await made.add("a")
        await made.until(lambda: made.fatal)
        assert [str(error) for error in made.fatal] == ["broken books"]
        assert isinstance(await fails(made.steps), EngineFailed)
    async with driven() as made:
        made.steps.post(lambda _: 1 / 0)
        await made.until(lambda: made.fatal)
        assert isinstance(made.fatal[0], ZeroDivisionError)


async def test_the_books_are_looked_at_when_it_rests() -> None:
    """Wrong books are found while nobody waits."""
    async with driven(check_after_idle_s=0.01) as made:
        await made.steps.call(lambda engine: engine.blocks.allocate(1))  # type: ignore[attr-defined]
        await made.until(lambda: made.fatal)
        assert isinstance(made.fatal[0], AssertionError)


def test_engines_of_one_loop_take_turns_with_their_books() -> None:
    """A look of 40 ms is followed by two seconds without another."""
    checks = BookChecks()
    assert checks.may_begin(100.0)
    checks.took(0.04, 100.04)
    assert not checks.may_begin(102.0)
    assert checks.may_begin(102.05)
