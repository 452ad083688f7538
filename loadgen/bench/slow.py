"""``mesh bench slow``: what clients that do not read cost those who do.

A few clients ask for much: two over HTTP, two on the bus, on plain sockets. In one half of the time
they read as fast as it comes, in the other they read nothing; short blocks of both take turns in
one mesh, so that the machine's mood falls on both. What is compared is the ITL of the others, who
read all the time: the load is the same, only the slowness differs.

A client of the bridge that does not read is cut when its buffers are full: its request ends, and
the reason lies behind what it had not read. In the last block the greedy ones wait for that.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
import typer

from infra.bus import Bus
from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from infra.task_scope import task_scope
from loadgen.bench.greedy import Block, Cuts, Greedy
from loadgen.bench.own_mesh import OwnMesh, own_mesh
from loadgen.bench.result import BenchResult, Figure
from loadgen.chaos.leaks import leaked_blocks
from loadgen.chaos.mesh import ChaosMesh
from loadgen.driver import Target
from loadgen.loop import fast_loop
from loadgen.machine import MachineNote
from loadgen.measure import RequestResult
from loadgen.settings import user_of
from loadgen.targets import BusTarget, HttpTarget
from loadgen.workload import Workload
from pipeline.client import MeshClient
from schemas.errors import ConfigError, MeshError

MODEL = "smollm2-135m"
MAX_WAITING = 256  # pieces of an answer that the bridge keeps for a client
_TIMEOUT_S = 60.0
_CUT_S = 90.0  # for a buffer to be full


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSettings:
    """How long, how many.

    Attributes:
        pairs: of blocks: one in which the greedy clients read, one in which they don't.
        readers: the others, half over HTTP and half on the bus.
        greedy: of each kind.

    Raises:
        ConfigError: a number out of its range.
    """

    pairs: int = 8
    block_s: float = 5.0
    readers: int = 8
    greedy: int = 2
    output_len: int = 64
    speed: float = 2.0

    def __post_init__(self) -> None:
        for name, least, most in (("pairs", 1, 1000), ("readers", 2, 256), ("greedy", 1, 64)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be {least} to {most}", param=name)
        if not 0.5 <= self.block_s <= 600:
            raise ConfigError("block must be 0.5 to 600 seconds", param="block")


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a run saw."""

    results: list[RequestResult] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    cuts: Cuts = field(default_factory=Cuts)
    num_leaked: int = 0


def command(
    pairs: Annotated[int, typer.Option(help="of blocks: all read, some don't")] = 8,
    block: Annotated[float, typer.Option(help="seconds of each block")] = 5.0,
    readers: Annotated[int, typer.Option(help="clients that always read")] = 8,
    greedy: Annotated[int, typer.Option(help="of each kind: HTTP, bus")] = 2,
    output_len: Annotated[int, typer.Option(help="tokens of a reader's answer")] = 64,
    speed: Annotated[float, typer.Option(help="of the simulated engine")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Compare the gaps between tokens with and without clients that do not read.

    Starts a mesh of its own, with the simulated engine. Exit code 1 when a reader's request failed
    or a block stayed.
    """
    machine = MachineNote.now()
    try:
        settings = SlowSettings(
            pairs=pairs, block_s=block, readers=readers, greedy=greedy, output_len=output_len,
            speed=speed,
        )  # fmt: skip
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            seen = runner.run(measure(settings))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench slow", ours)) from error
    make_result(settings, seen, machine).show(as_json=json)
    is_bad = seen.num_leaked or any(one.state == "failed" for one in seen.results)
    raise typer.Exit(EXIT_FAILED if is_bad else 0)


async def measure(settings: SlowSettings) -> Seen:
    """Play all blocks.

    Raises:
        MeshError: the mesh did not start.
    """
    flags = ("--engine", "simulated", "--prefill", "1", "--decode", "1")
    env = {
        "MESH_WORKER_SPEED": f"{settings.speed:g}",
        "MESH_BRIDGE_MAX_WAITING_DELTAS": str(MAX_WAITING),
    }
    seen = Seen()
    async with own_mesh(flags, env) as own, AsyncExitStack() as stack:
        url = own.control_nats_url
        bus = await stack.enter_async_context(
            await Bus.connect(url, role=user_of(url), name="slow")
        )
        mesh = ChaosMesh(bus, (own.url,), own.nats_url)
        await mesh.watch()
        greedy = Greedy(own, MODEL, settings.greedy, bus, seen.cuts)
        await greedy.listen()
        async with task_scope() as readers:
            await _start_readers(settings, own, seen, readers, stack)
            for is_slow in itertools.islice(
                itertools.cycle((False, True, True, False)), 2 * settings.pairs
            ):
                seen.blocks.append(await greedy.play(settings.block_s, is_slow=is_slow))
            await greedy.play_until_cut(_CUT_S)
        seen.num_leaked = await leaked_blocks(mesh)
    return seen


async def _start_readers(
    settings: SlowSettings,
    own: OwnMesh,
    seen: Seen,
    tasks: asyncio.TaskGroup,
    stack: AsyncExitStack,
) -> None:
    http = HttpTarget(own.url, "completions")
    stack.callback(http.close)
    client = await stack.enter_async_context(MeshClient.connect(own.nats_url))
    targets: tuple[Target, ...] = (http, BusTarget(client, timeout_s=_TIMEOUT_S))
    workload = Workload(model=MODEL, input_len=16, output_len=settings.output_len)
    numbers = itertools.count()
    for number in range(settings.readers):
        tasks.create_task(_read(targets[number % 2], workload, numbers, seen))


async def _read(
    target: Target, workload: Workload, numbers: itertools.count[int], seen: Seen
) -> None:
    """One request after another, for ever; a failure is counted."""
    while True:
        result = RequestResult(number=next(numbers), output_len=workload.output_len)
        seen.results.append(result)
        result.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await target.run(workload.request(result.number), result)
        except (MeshError, OSError, TimeoutError) as error:
            result.fail(type(error).__name__, str(error))


def gaps_ms(results: list[RequestResult], blocks: list[Block], *, is_slow: bool) -> list[float]:
    """Gaps between two token events of one stream that both fell into a block of one kind."""
    found: list[float] = []
    spans = [(one.start_s, one.end_s) for one in blocks if one.is_slow == is_slow]
    for result in results:
        times = np.asarray(result.event_s)
        for start_s, end_s in spans:
            inside = times[(times >= start_s) & (times < end_s)]
            found += (1e3 * np.diff(inside)).tolist()
    return found


def make_result(settings: SlowSettings, seen: Seen, machine: MachineNote) -> BenchResult:
    """The gaps of both kinds of blocks, and what became of the slow."""
    by_kind = {
        name: gaps_ms(seen.results, seen.blocks, is_slow=is_slow)
        for name, is_slow in (("all_read", False), ("some_do_not_read", True))
    }
    spreads = {name: _spread(gaps) for name, gaps in by_kind.items()}
    change = spreads["some_do_not_read"]["p99"] / max(spreads["all_read"]["p99"], 1e-9) - 1
    figures: dict[str, Figure] = {
        "itl_ms": spreads,
        "itl_p99_change_percent": round(100 * change, 1),
        "requests": sum(one.state == "completed" for one in seen.results),
        "errors": sum(one.state == "failed" for one in seen.results),
        "slow_clients": seen.cuts.num_slow,
        "cut": len(seen.cuts.after_s),
        "cut_and_told_why": seen.cuts.num_told,
        "cut_after_s": round(float(np.median(seen.cuts.after_s)), 2) if seen.cuts.after_s else 0.0,
        "leaked_blocks": seen.num_leaked,
    }
    return BenchResult(
        bench="slow",
        figures=figures,
        settings=msgspec.to_builtins(settings),
        machine=machine,
        notes=("simulated engine: the gaps are of its cost model, their change is the mesh's",),
    )


def _spread(gaps: list[float]) -> dict[str, float]:
    if not gaps:
        return {"p50": 0.0, "p99": 0.0, "count": 0}
    p50, p99 = np.percentile(gaps, (50, 99)).tolist()
    return {"p50": round(p50, 3), "p99": round(p99, 3), "count": len(gaps)}
