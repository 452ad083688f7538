"""Sends requests in an open or a closed loop and keeps what came of each.

Open loop: a request is sent when it is due, however many are still running. It is never delayed by
the server; where this process itself is late, the lag is kept. Only the limit of requests in
flight stops it: what is due then is skipped and counted. Closed loop: a fixed number of slots,
each sends its next request when the last one has ended.

Everything lands in a :class:`~loadgen.recorder.Recorder` of the caller, also when a run is
cancelled in the middle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from loadgen.measure import RequestResult, count_errors
from loadgen.recorder import Recorder
from loadgen.workload import LoadRequest
from schemas.errors import MeshError

TICK_S = 0.1
ERROR_PAUSE_S = 0.05  # a closed-loop slot rests after a failure, or refusals would spin it
WARMUP_CONCURRENCY = 4


class Target(Protocol):
    """Something that answers requests."""

    async def run(self, request: LoadRequest, result: RequestResult) -> None:
        """Send ``request``, add each token event to ``result``, then complete or fail it.

        A MeshError or an OSError raised here counts as a failure, too. When cancelled it tells
        the server to stop, in bounded time, and re-raises.
        """


class WarmupFailed(MeshError):
    """No request of the warm-up was answered, so measuring would make no sense."""

    code = "warmup_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds a run: of sending, of one request, of waiting for the last ones."""

    duration_s: float
    num_requests: int
    timeout_s: float
    drain_s: float
    max_in_flight: int


async def warm_up(target: Target, requests: Iterable[LoadRequest], timeout_s: float) -> None:
    """Run ``requests``, a few at a time, and forget the results.

    Raises:
        WarmupFailed: there were requests, and every one failed; says how the first one did.
    """
    recorder = Recorder()
    source = iter(requests)

    async def slot() -> None:
        for request in source:
            await _run_one(target, request, recorder.begin(request), timeout_s, recorder)

    async with asyncio.TaskGroup() as group:
        for _ in range(WARMUP_CONCURRENCY):
            group.create_task(slot())
    if recorder.results and recorder.num_failed == len(recorder.results):
        kind, count = next(iter(count_errors(recorder.results).items()))
        raise WarmupFailed(f"all {count.num} warm-up requests failed: {kind}: {count.example}")


async def open_loop(
    target: Target,
    requests: Iterator[LoadRequest],
    offsets_s: Iterator[float],
    limits: Limits,
    recorder: Recorder,
) -> None:
    """Send a request at every offset until a limit is reached, then await those in flight."""
    recorder.start()
    running: set[asyncio.Task[None]] = set()
    try:
        async with asyncio.TaskGroup() as group:
            start_s = time.monotonic()
            for offset_s in islice(offsets_s, limits.num_requests):
                if offset_s >= limits.duration_s:
                    await _sleep_until(start_s + limits.duration_s)
                    break
                request = next(requests)
                due_s = start_s + offset_s
                await _sleep_until(due_s)
                if recorder.num_in_flight >= limits.max_in_flight:
                    recorder.num_skipped += 1
                    continue
                result = recorder.begin(request, due_s)
                task = group.create_task(
                    _run_one(target, request, result, limits.timeout_s, recorder)
                )
                running.add(task)
                task.add_done_callback(running.discard)
            await _drain(running, limits.drain_s)
    finally:
        recorder.stop()


async def closed_loop(
    target: Target,
    requests: Iterator[LoadRequest],
    concurrency: int,
    limits: Limits,
    recorder: Recorder,
) -> None:
    """Keep ``concurrency`` requests running until a limit is reached, then await the last ones."""
    recorder.start()
    source = islice(requests, limits.num_requests)
    deadline_s = time.monotonic() + limits.duration_s

    async def slot() -> None:
        for request in source:
            result = recorder.begin(request)
            await _run_one(target, request, result, limits.timeout_s, recorder)
            if result.state == "failed":
                await asyncio.sleep(ERROR_PAUSE_S)
            if time.monotonic() >= deadline_s:
                return

    try:
        async with asyncio.TaskGroup() as group:
            slots = {group.create_task(slot()) for _ in range(concurrency)}
            await _drain(slots, limits.duration_s + limits.drain_s)
    finally:
        recorder.stop()


async def tick(recorder: Recorder, on_tick: Callable[[Recorder], None]) -> None:
    """Call ``on_tick`` ten times a second until cancelled.

    How late each tick comes is kept in ``recorder.loop_lag_s``: as late were the arrival times of
    tokens that were read in that moment.
    """
    while True:
        due_s = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        if recorder.started_s is not None:
            recorder.loop_lag_s.append(max(0.0, time.monotonic() - due_s))
        on_tick(recorder)


async def _run_one(
    target: Target,
    request: LoadRequest,
    result: RequestResult,
    timeout_s: float,
    recorder: Recorder,
) -> None:
    """Run one request; whatever the server or the network does wrong is in ``result``."""
    result.sent_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            await target.run(request, result)
    except TimeoutError:
        result.fail("timeout", f"no complete answer within {timeout_s:g} s")
    except MeshError as error:
        result.fail(error.code, error.message)
    except OSError as error:
        result.fail("connection", str(error) or type(error).__name__)
    finally:
        recorder.end(result)


async def _sleep_until(due_s: float) -> None:
    """Sleep up to the moment; yield once in any case, so that tasks get their turn."""
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def _drain(tasks: set[asyncio.Task[None]], limit_s: float) -> None:
    """Wait for ``tasks``, and cancel what still runs after ``limit_s``."""
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=limit_s)
    for task in pending:
        task.cancel()
