"""One load run from settings to a recorder full of results."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from infra.task_scope import task_scope
from loadgen.arrivals import arrivals
from loadgen.driver import Limits, Target, closed_loop, open_loop, tick, warm_up
from loadgen.recorder import Recorder
from loadgen.settings import LoadSettings
from loadgen.stages import StageTime, metrics_urls, read_stages, stage_times
from loadgen.targets import open_target
from loadgen.traces import TraceWorkload
from loadgen.workload import Workload


@dataclass(slots=True, kw_only=True)
class Watched:
    """The mesh whose stages are to be told, by its data directory, and what was found there."""

    data: str | None = None
    stages: dict[str, StageTime] = field(default_factory=dict)


async def run_load(
    settings: LoadSettings,
    recorder: Recorder,
    on_tick: Callable[[Recorder], None],
    watched: Watched | None = None,
) -> None:
    """Connect, warm up, measure; ``recorder`` holds the results also when this is cancelled.

    Raises:
        WarmupFailed: no warm-up request was answered.
        BusUnavailable: no broker at a nats:// target.
        ConfigError: the trace can't be read, or there is no mesh to be watched.
        ScrapeFailed: a process of that mesh does not tell its figures.
    """
    workload = settings.workload()
    async with open_target(settings) as target:
        await warm_up(target, workload.warmup(settings.warmup), settings.timeout_s)
        async with task_scope() as tasks:
            tasks.create_task(tick(recorder, on_tick))
            async with _watching(watched):
                await _measure(settings, workload, target, recorder)


@asynccontextmanager
async def _watching(watched: Watched | None) -> AsyncIterator[None]:
    """Note what the stages of the mesh did while the block ran, also when it is cancelled."""
    if watched is None or watched.data is None:
        yield
        return
    urls = await metrics_urls(watched.data)
    before = await read_stages(urls)
    try:
        yield
    finally:
        watched.stages = stage_times(before, await read_stages(urls))


async def _measure(
    settings: LoadSettings,
    workload: Workload | TraceWorkload,
    target: Target,
    recorder: Recorder,
) -> None:
    num_requests = settings.num_requests
    if isinstance(workload, TraceWorkload):
        num_requests = min(num_requests, len(workload.entries))
    limits = Limits(
        duration_s=settings.duration_s,
        num_requests=num_requests,
        timeout_s=settings.timeout_s,
        drain_s=settings.drain_s,
        max_in_flight=settings.max_in_flight,
    )
    requests = workload.requests()
    rate = settings.arrival_rate
    if settings.concurrency is not None:
        await closed_loop(target, requests, settings.concurrency, limits, recorder)
    elif rate is not None:
        offsets_s = arrivals(rate, settings.burstiness, random.Random(settings.seed))
        await open_loop(target, requests, offsets_s, limits, recorder)
    elif isinstance(workload, TraceWorkload):
        offsets_s = workload.offsets_s(settings.trace_speed)
        await open_loop(target, requests, offsets_s, limits, recorder)
