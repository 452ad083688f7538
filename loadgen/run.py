"""One load run from settings to a recorder full of results."""

from __future__ import annotations

import random
from collections.abc import Callable

from infra.task_scope import task_scope
from loadgen.arrivals import poisson
from loadgen.driver import Limits, Target, closed_loop, open_loop, tick, warm_up
from loadgen.recorder import Recorder
from loadgen.settings import LoadSettings
from loadgen.targets import open_target


async def run_load(
    settings: LoadSettings, recorder: Recorder, on_tick: Callable[[Recorder], None]
) -> None:
    """Connect, warm up, measure; ``recorder`` holds the results also when this is cancelled.

    Raises:
        WarmupFailed: no warm-up request was answered.
        BusUnavailable: no broker at a nats:// target.
    """
    async with open_target(settings) as target:
        await warm_up(target, settings.workload.warmup(settings.warmup), settings.timeout_s)
        async with task_scope() as tasks:
            tasks.create_task(tick(recorder, on_tick))
            await _measure(settings, target, recorder)


async def _measure(settings: LoadSettings, target: Target, recorder: Recorder) -> None:
    limits = Limits(
        duration_s=settings.duration_s,
        num_requests=settings.num_requests,
        timeout_s=settings.timeout_s,
        drain_s=settings.drain_s,
        max_in_flight=settings.max_in_flight,
    )
    requests = settings.workload.requests()
    if settings.rate is not None:
        offsets_s = poisson(settings.rate, random.Random(settings.seed))
        await open_loop(target, requests, offsets_s, limits, recorder)
    elif settings.concurrency is not None:
        await closed_loop(target, requests, settings.concurrency, limits, recorder)
