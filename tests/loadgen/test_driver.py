import asyncio
import random
import time
from collections.abc import Iterator
from itertools import count, islice, repeat

import pytest

from loadgen.arrivals import Rate, arrivals
from loadgen.driver import WarmupFailed, closed_loop, open_loop, tick, warm_up
from loadgen.measure import count_errors
from loadgen.recorder import Recorder
from schemas.errors import QueueFull
from tests.loadgen.fakes import WORKLOAD, FakeTarget, limits


async def test_open_loop_sends_while_nothing_is_answered() -> None:
    """Every arrival is sent although no request before it has ended."""
    target, recorder = FakeTarget(), Recorder()
    target.gate.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        offsets = islice(arrivals(Rate.constant(2000.0), 1.0, random.Random(0)), 100)
        group.create_task(open_loop(target, WORKLOAD.requests(), offsets, limits(), recorder))
        await target.until_running(100)
        assert recorder.num_in_flight == 100
        target.gate.set()
    assert sorted(target.numbers) == list(range(100))
    assert all(result.state == "completed" for result in recorder.results)
    assert recorder.num_in_flight == 0


async def test_open_loop_sends_nothing_before_it_is_due() -> None:
    """The schedule is kept: no request leaves early, and its lateness is known."""
    target, recorder = FakeTarget(), Recorder()
    offsets = [0.0, 0.03, 0.03, 0.06]
    await open_loop(target, WORKLOAD.requests(), iter(offsets), limits(), recorder)
    first_due_s = recorder.results[0].due_s
    assert first_due_s is not None
    for offset_s, result in zip(offsets, recorder.results, strict=True):
        assert result.due_s == pytest.approx(first_due_s + offset_s)
        assert result.lag_s is not None
        # The loop's timers have a millisecond's grain.
        assert result.sent_s >= result.due_s - 0.0015


async def test_a_late_generator_says_so_and_still_sends_everything() -> None:
    """When this process blocks, what was due meanwhile is sent at once, with its lag kept."""
    recorder = Recorder()

    class Blocking(FakeTarget):
        async def run(self, request, result):  # type: ignore[no-untyped-def]
            if request.number == 0:
                until_s = time.monotonic() + 0.1
                while time.monotonic() < until_s:
                    pass
            await super().run(request, result)

    target = Blocking()
    offsets = (0.001 * number for number in range(50))
    await open_loop(target, WORKLOAD.requests(), offsets, limits(), recorder)
    assert len(recorder.results) == 50
    lags_s = [result.lag_s for result in recorder.results]
    assert max(lag_s for lag_s in lags_s if lag_s is not None) > 0.04


async def test_open_loop_skips_and_counts_over_the_limit_in_flight() -> None:
    """With the limit reached an arrival is neither sent nor delayed, but counted."""
    target, recorder, all_due = FakeTarget(), Recorder(), asyncio.Event()
    target.gate.clear()

    def offsets() -> Iterator[float]:
        yield from [0.0] * 10
        all_due.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        few = limits(max_in_flight=3)
        group.create_task(open_loop(target, WORKLOAD.requests(), offsets(), few, recorder))
        await all_due.wait()
        assert recorder.num_in_flight == 3
        target.gate.set()
    assert target.most_running == len(recorder.results) == 3
    assert recorder.num_skipped == 7


async def test_open_loop_ends_at_its_duration() -> None:
    """Nothing due after the duration is sent, and measuring lasts the whole of it."""
    target, recorder = FakeTarget(), Recorder()
    short = limits(duration_s=0.05)
    await open_loop(target, WORKLOAD.requests(), iter([0.01, 5.0]), short, recorder)
    assert len(recorder.results) == 1
    assert 0.049 <= recorder.wall_s < 4


async def test_what_runs_after_the_drain_time_is_given_up_as_unfinished() -> None:
    """A server that never answers can't hold the run: its requests are cancelled."""
    target, recorder = FakeTarget(), Recorder()
    target.gate.clear()
    few = limits(num_requests=5, drain_s=0.05)
    await open_loop(target, WORKLOAD.requests(), repeat(0.0), few, recorder)
    assert [result.state for result in recorder.results] == ["running"] * 5
    assert all(len(result.event_s) == 1 for result in recorder.results)
    assert target.num_cancelled == 5
    assert recorder.num_in_flight == 0


@pytest.mark.parametrize("concurrency", [1, 7])
async def test_closed_loop_keeps_its_concurrency(concurrency: int) -> None:
    """Always that many requests run while there are more to send, never one more."""
    target, recorder = FakeTarget(), Recorder()
    target.gate.clear()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        some = limits(num_requests=40)
        group.create_task(closed_loop(target, WORKLOAD.requests(), concurrency, some, recorder))
        await target.until_running(concurrency)
        target.gate.set()
    assert target.most_running == concurrency
    assert sorted(target.numbers) == list(range(40))
    assert all(result.lag_s is None for result in recorder.results)


async def test_closed_loop_ends_at_its_duration() -> None:
    """After the duration no slot begins another request."""
    target, recorder = FakeTarget(), Recorder()
    await closed_loop(
        target, WORKLOAD.requests(), 2, limits(duration_s=0.05, num_requests=10**6), recorder
    )
    assert recorder.results
    assert recorder.started_s is not None
    assert max(result.sent_s for result in recorder.results) <= recorder.started_s + 0.06


async def test_closed_loop_gives_up_what_is_stuck() -> None:
    """A closed loop against a silent server ends after duration and drain."""
    target, recorder = FakeTarget(), Recorder()
    target.gate.clear()
    await closed_loop(
        target, WORKLOAD.requests(), 3, limits(duration_s=0.03, drain_s=0.03), recorder
    )
    assert [result.state for result in recorder.results] == ["running"] * 3


async def test_errors_are_kept_by_kind_and_the_run_goes_on() -> None:
    """Our errors give their code, network errors "connection"; the other requests complete."""
    faults = {1: QueueFull("full"), 2: ConnectionRefusedError("refused"), 4: QueueFull("again")}
    target, recorder = FakeTarget(fault=faults.get), Recorder()
    offsets = iter([0.0] * 6)
    await open_loop(target, WORKLOAD.requests(), offsets, limits(), recorder)
    errors = count_errors(recorder.results)
    assert {kind: error.num for kind, error in errors.items()} == {"queue_full": 2, "connection": 1}
    assert sum(result.state == "completed" for result in recorder.results) == 3
    assert recorder.num_failed == 3


async def test_a_request_over_its_time_fails_as_timeout() -> None:
    """The time limit of one request cancels it and keeps what it had."""
    target, recorder = FakeTarget(), Recorder()
    target.gate.clear()
    one = limits(num_requests=1, timeout_s=0.02)
    await closed_loop(target, WORKLOAD.requests(), 1, one, recorder)
    (result,) = recorder.results
    assert (result.state, result.error_kind, len(result.event_s)) == ("failed", "timeout", 1)
    assert target.num_cancelled == 1


async def test_a_bug_in_a_target_is_no_result() -> None:
    """What is neither our error nor the network's ends the run with its traceback."""
    target = FakeTarget(fault=lambda number: ZeroDivisionError("bug"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await closed_loop(target, WORKLOAD.requests(), 1, limits(num_requests=1), Recorder())
    assert caught.group_contains(ZeroDivisionError)


async def test_refusals_do_not_spin_a_closed_loop() -> None:
    """A slot rests after a failure, so an instantly refusing server is asked at a bounded rate."""
    target, recorder = FakeTarget(fault=lambda number: QueueFull("full")), Recorder()
    await closed_loop(target, WORKLOAD.requests(), 1, limits(duration_s=0.2), recorder)
    assert 1 <= len(recorder.results) <= 5


async def test_a_cancelled_run_leaves_what_it_measured() -> None:
    """Ctrl-C in the middle: completed results stay, the running ones are unfinished."""
    target, recorder = FakeTarget(), Recorder()

    def close_gate_after_twelve(number: int) -> None:
        if number == 12:
            target.gate.clear()

    target.fault = close_gate_after_twelve
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        many = limits(num_requests=10**6)
        run = group.create_task(closed_loop(target, WORKLOAD.requests(), 2, many, recorder))
        await target.until(lambda: target.num_running == 2 and not target.gate.is_set())
        run.cancel()
    states = [result.state for result in recorder.results]
    assert states.count("completed") >= 12
    assert states.count("running") == 2
    assert recorder.ended_s is not None
    assert target.num_running == 0


async def test_warm_up_is_not_measured_and_fails_when_nothing_answers() -> None:
    """One answer is enough to go on; none stops the run and says why."""
    await warm_up(FakeTarget(), [], 1.0)
    half = FakeTarget(fault=lambda number: QueueFull("full") if number % 2 else None)
    await warm_up(half, WORKLOAD.warmup(4), 1.0)
    assert sorted(half.numbers) == [-4, -3, -2, -1]
    dead = FakeTarget(fault=lambda number: ConnectionRefusedError("nobody there"))
    with pytest.raises(WarmupFailed, match=r"all 3 .* connection: nobody there"):
        await warm_up(dead, WORKLOAD.warmup(3), 1.0)


async def test_ticks_keep_how_late_the_loop_is() -> None:
    """A loop that was blocked shows it in the lag of its next tick."""
    recorder, seen = Recorder(), asyncio.Queue[int]()
    recorder.start()
    numbers = count()

    def on_tick(_: Recorder) -> None:
        seen.put_nowait(next(numbers))

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        ticker = group.create_task(tick(recorder, on_tick))
        await seen.get()
        until_s = time.monotonic() + 0.25
        while time.monotonic() < until_s:
            pass
        await seen.get()
        ticker.cancel()
    assert max(recorder.loop_lag_s) > 0.1
