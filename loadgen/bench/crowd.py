"""``mesh bench crowd``: thousands of requests that wait, and a thousand streams at a time.

The workers of a mesh of its own stand still (SIGSTOP) until every request is admitted and waits
in the queue; then they go on, and all is read to its end. Meanwhile the memory of every kind of
process is looked at once a second. Simulated engines: times are of their cost model, memory and
errors are the mesh's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import typer

from infra.bus import Bus, waiting_work
from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from infra.file_limit import raise_file_limit
from infra.task_scope import task_scope
from loadgen.bench.memory import Memory, MemorySample
from loadgen.bench.own_mesh import OwnMesh, own_mesh
from loadgen.bench.result import BenchResult, Figure
from loadgen.chaos.leaks import leaked_blocks
from loadgen.chaos.mesh import ChaosMesh, NotWhole, until
from loadgen.driver import Target
from loadgen.loop import fast_loop
from loadgen.machine import MachineNote
from loadgen.measure import RequestResult
from loadgen.settings import user_of
from loadgen.targets import BusTarget, HttpTarget
from loadgen.workload import Workload
from schemas import subjects
from schemas.errors import BusUnavailable, ConfigError, MeshError

MODEL = "smollm2-135m"
_NUM_PREFILL = _NUM_DECODE = 2
_BATCH = 200  # requests sent before the next look at admission's queue
_LOOK_S = 0.1
_SAMPLE_S = 1.0
_START_S = 60.0
_SPARE_FILES = 256
_PREFILL_SUBJECTS = f"{subjects.ROOT}.prefill."


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdSettings:
    """How many, and how long.

    Attributes:
        queued: requests in all.
        streams: of them at once in the running batches.
        speed: of the simulated engine.
        limit_s: for all of it.

    Raises:
        ConfigError: a number out of its range, or more connections than this process may open.
    """

    queued: int = 10_000
    streams: int = 1000
    input_len: int = 8
    output_len: int = 32
    over: Literal["http", "bus"] = "http"
    speed: float = 0.1
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        for name, most in (("queued", 100_000), ("streams", 8000), ("output_len", 1000)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be 1 to {most}", param=name)
        if self.over == "http" and (most := raise_file_limit()) < self.queued + _SPARE_FILES:
            raise ConfigError(
                f"{self.queued} connections need as many open files, and the limit is {most}",
                param="queued",
            )

    def environment(self) -> dict[str, str]:
        """Of the mesh: nothing is refused, so that everything waits."""
        per_worker = math.ceil(self.streams / _NUM_DECODE)
        return {
            "MESH_CONTROL_MAX_QUEUED_REQUESTS": str(2 * self.queued),
            "MESH_BRIDGE_MAX_OPEN_REQUESTS": str(2 * self.queued),
            "MESH_BRIDGE_MAX_CONNECTIONS": str(2 * self.queued),
            "MESH_BRIDGE_REQUEST_TIMEOUT_S": f"{min(self.limit_s, 780.0):g}",
            "MESH_BRIDGE_ACCEPT_TIMEOUT_S": "60",
            "MESH_WORKER_MAX_NUM_SEQUENCES": str(per_worker),
            "MESH_WORKER_MAX_BATCH_TOKENS": str(max(4096, per_worker)),
            "MESH_WORKER_SPEED": f"{self.speed:g}",
        }


@dataclass(slots=True, kw_only=True)
class Crowd:
    """What was seen."""

    results: list[RequestResult]
    samples: list[MemorySample] = field(default_factory=list)
    num_waiting_peak: int = 0  # most prefill tasks that were queued at a time
    submit_s: float = 0.0
    drain_s: float = 0.0
    all_queued: MemorySample | None = None
    num_leaked: int = 0

    @property
    def errors(self) -> Counter[str]:
        """Requests that failed, by why; complete at the end."""
        return Counter(one.error_kind for one in self.results if one.state == "failed")


def command(
    queued: Annotated[int, typer.Option(help="requests in all")] = 10_000,
    streams: Annotated[int, typer.Option(help="that run at a time")] = 1000,
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 8,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 32,
    over: Annotated[Literal["http", "bus"], typer.Option(help="how they are sent")] = "http",
    speed: Annotated[float, typer.Option(help="of the simulated engine")] = 0.1,
    limit: Annotated[float, typer.Option(help="seconds for all of it")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Let thousands of requests wait, then stream a thousand at a time; watch memory and errors.

    Starts a mesh of its own, with the simulated engine. Exit code 1 when a request failed or a
    block stayed.
    """
    machine = MachineNote.now()
    try:
        settings = CrowdSettings(
            queued=queued, streams=streams, input_len=input_len, output_len=output_len, over=over,
            speed=speed, limit_s=limit,
        )  # fmt: skip
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            crowd = runner.run(measure(settings))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench crowd", ours)) from error
    make_result(settings, crowd, machine).show(as_json=json)
    raise typer.Exit(EXIT_FAILED if crowd.errors or crowd.num_leaked else 0)


async def measure(settings: CrowdSettings) -> Crowd:
    """Send all, let them wait, let them run.

    Raises:
        MeshError: the mesh did not start, or all of it took longer than ``limit_s``.
    """
    flags = ("--engine", "simulated", "--prefill", str(_NUM_PREFILL),
             "--decode", str(_NUM_DECODE))  # fmt: skip
    async with own_mesh(flags, settings.environment()) as own:
        url = own.control_nats_url
        async with await Bus.connect(url, role=user_of(url), name="crowd") as bus:
            mesh = ChaosMesh(bus, (own.url,), own.nats_url)
            await mesh.watch()
            if not await until(
                lambda: len(mesh.ready("worker")) == _NUM_PREFILL + _NUM_DECODE, _START_S
            ):
                raise NotWhole(f"the workers were not ready within {_START_S:.0f} s")
            await asyncio.sleep(2 * bus.times.beat_s)  # everybody else was heard
            return await _send_and_read(settings, own, mesh)


async def _send_and_read(settings: CrowdSettings, own: OwnMesh, mesh: ChaosMesh) -> Crowd:
    workload = Workload(model=MODEL, input_len=settings.input_len, output_len=settings.output_len)
    crowd = Crowd(
        results=[
            RequestResult(number=k, output_len=settings.output_len) for k in range(settings.queued)
        ]
    )
    async with contextlib.AsyncExitStack() as stack:
        target = await _target(settings, own, stack)
        helpers = await stack.enter_async_context(task_scope())
        memory = Memory(mesh)
        crowd.samples.append(memory.sample())
        helpers.create_task(_watch(crowd, memory), name="memory")
        for beat in mesh.ready("worker"):
            mesh.send(mesh.target(beat), signal.SIGSTOP)
        try:
            async with asyncio.timeout(settings.limit_s), asyncio.TaskGroup() as tasks:
                await _submit(crowd, workload, target, mesh.bus, tasks)
                crowd.all_queued = memory.sample()
                mesh.wake_all()
                started_s = time.monotonic()
        except TimeoutError:
            raise NotWhole(f"not read to the end within {settings.limit_s:g} s") from None
        finally:
            mesh.wake_all()
        crowd.drain_s = time.monotonic() - started_s
        crowd.num_leaked = await leaked_blocks(mesh)
        crowd.samples.append(memory.sample())
    return crowd


async def _target(
    settings: CrowdSettings, own: OwnMesh, stack: contextlib.AsyncExitStack
) -> Target:
    if settings.over == "http":
        http = HttpTarget(own.url, "completions")
        stack.callback(http.close)
        return http
    from pipeline.client import MeshClient

    client = await stack.enter_async_context(MeshClient.connect(own.nats_url))
    return BusTarget(client, timeout_s=settings.limit_s)


async def _submit(
    crowd: Crowd, workload: Workload, target: Target, bus: Bus, tasks: asyncio.TaskGroup
) -> None:
    """Send everything, a batch when the one before is admitted; returns when all of it waits."""
    started_s = time.monotonic()
    for start in range(0, len(crowd.results), _BATCH):
        batch = crowd.results[start : start + _BATCH]
        for result in batch:
            tasks.create_task(_run(target, workload, result))
        await _until_queued(crowd, bus, start + len(batch))
    crowd.submit_s = time.monotonic() - started_s


async def _until_queued(crowd: Crowd, bus: Bus, num_sent: int) -> None:
    while True:
        with contextlib.suppress(BusUnavailable):  # a busy broker answers late: look again
            if await _count(crowd, bus) + crowd.errors.total() >= num_sent:
                return
        await asyncio.sleep(_LOOK_S)


async def _count(crowd: Crowd, bus: Bus) -> int:
    """Prefill tasks that lie in the queue."""
    waiting = await waiting_work(bus)
    num = sum(count for subject, count in waiting.items() if subject.startswith(_PREFILL_SUBJECTS))
    crowd.num_waiting_peak = max(crowd.num_waiting_peak, num)
    return num


async def _run(target: Target, workload: Workload, result: RequestResult) -> None:
    result.sent_s = time.monotonic()
    try:
        await target.run(workload.request(result.number), result)
    except MeshError as error:
        result.fail(error.code, error.message)
    except (OSError, TimeoutError) as error:
        result.fail(type(error).__name__, str(error))


async def _watch(crowd: Crowd, memory: Memory) -> None:
    while True:
        crowd.samples.append(memory.sample())
        await asyncio.sleep(_SAMPLE_S)


def num_at_once(results: Sequence[RequestResult]) -> int:
    """The most streams that were between their first and their last token at a time."""
    steps = [(one.event_s[0], 1) for one in results if one.event_s]
    steps += [(one.event_s[-1], -1) for one in results if one.event_s]
    return max(itertools.accumulate(step for _, step in sorted(steps)), default=0)


def make_result(settings: CrowdSettings, crowd: Crowd, machine: MachineNote) -> BenchResult:
    """Megabytes by kind of process: at the start, when all waited, at most, at the end."""
    first, last = crowd.samples[0], crowd.samples[-1]
    memory: dict[str, Figure] = {
        kind: {
            "start": first.mb(kind),
            "queued": crowd.all_queued.mb(kind) if crowd.all_queued else 0.0,
            "peak": max(sample.mb(kind) for sample in crowd.samples),
            "end": last.mb(kind),
        }
        for kind in first.kinds
    }
    num_tokens = sum(one.num_tokens for one in crowd.results)
    figures: dict[str, Figure] = {
        "requests": len(crowd.results),
        "errors": crowd.errors.total(),
        "errors_by_kind": dict(crowd.errors),
        "queued_peak": crowd.num_waiting_peak,
        "streams_at_once": num_at_once(crowd.results),
        "submit_s": round(crowd.submit_s, 2),
        "drain_s": round(crowd.drain_s, 2),
        "tokens_per_s": round(num_tokens / max(crowd.drain_s, 1e-9), 1),
        "leaked_blocks": crowd.num_leaked,
        "memory_mb": memory,
    }
    return BenchResult(
        bench="crowd",
        figures=figures,
        settings=msgspec.to_builtins(settings),
        machine=machine,
        notes=("simulated engine: times are of its cost model", *_examples(crowd)),
    )


def _examples(crowd: Crowd) -> list[str]:
    """What one request of each kind of error was told."""
    told = {one.error_kind: one.error_message for one in crowd.results if one.state == "failed"}
    return [f"{kind}: {message}" for kind, message in sorted(told.items())]
