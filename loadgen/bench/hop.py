"""``mesh bench hop``: how long one request's messages take from stage to stage, without load.

Requests go one after another, from the client to admission as the bridge sends them, and every
time stands on the clock that all processes of this host share: see ``loadgen.bench.hop_trace``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.hop_trace import TRACE_SUBJECTS, TRACE_VARIABLE, HopTraces, RequestHops
from loadgen.bench.result import BenchResult, Figure
from loadgen.loop import fast_loop
from loadgen.machine import MachineNote
from loadgen.settings import user_of
from loadgen.workload import LoadRequest, Workload
from schemas.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from pipeline.client import MeshClient

REQUEST_TIMEOUT_S = 30.0
TRACE_TIMEOUT_S = 3.0
MAX_REQUESTS = 100_000
# The simulated engine's times are divided by this: 1000 is the most that it takes.
INSTANT_SPEED = "1000"


@dataclass(frozen=True, slots=True, kw_only=True)
class HopSettings:
    """What to send, and where: an empty ``nats_url`` means a mesh of our own.

    ``trace_nats_url`` is for a user who may hear the traces: the control's, say.

    Raises:
        ConfigError: a number out of its range.
    """

    nats_url: str
    trace_nats_url: str
    model: str
    num_requests: int
    num_warmup: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        numbers = {
            "requests": (self.num_requests, 1),
            "warmup": (self.num_warmup, 0),
            "input_len": (self.input_len, 1),
            "output_len": (self.output_len, 2),  # with one token nothing is handed to decode
        }
        for name, (value, least) in numbers.items():
            if not least <= value <= MAX_REQUESTS:
                raise ConfigError(f"{name} is not within {least} and {MAX_REQUESTS}", param=name)

    @property
    def workload(self) -> Workload:
        """The prompts; a new seed each time, or a mesh would have their blocks cached."""
        return Workload(
            model=self.model,
            input_len=self.input_len,
            output_len=self.output_len,
            seed=secrets.randbits(31),
        )


def command(
    nats: Annotated[
        str, typer.Option(help=f"bus of a running mesh whose workers have {TRACE_VARIABLE}=1")
    ] = "",
    trace_nats: Annotated[
        str, typer.Option(help="the same bus, as a user who hears mesh.v1.trace.*  [--nats]")
    ] = "",
    model: Annotated[str, typer.Option(help="model to ask for")] = "smollm2-135m",
    requests: Annotated[int, typer.Option(help="requests to measure")] = 200,
    warmup: Annotated[int, typer.Option(help="requests before them")] = 20,
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 64,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 8,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Time the hops of single requests through an unloaded mesh.

    Without --nats it starts a mesh of its own, with the simulated engine.
    """
    machine = MachineNote.now()
    try:
        settings = HopSettings(
            nats_url=nats,
            trace_nats_url=trace_nats or nats,
            model=model,
            num_requests=requests,
            num_warmup=warmup,
            input_len=input_len,
            output_len=output_len,
        )
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            hops = runner.run(measure(settings))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench hop", ours)) from error
    make_result(settings, hops, machine).show(as_json=json)


async def measure(settings: HopSettings) -> list[RequestHops]:
    """The times of ``settings.num_requests`` requests, sent one after another.

    Raises:
        NoTrace: the workers do not tell their hops.
        MeshError: whatever else a request failed with.
    """
    async with _bus_of(settings) as (nats_url, trace_nats_url):
        from infra.bus import Bus
        from pipeline.client import MeshClient

        traces = HopTraces()
        async with (
            MeshClient.connect(nats_url) as client,
            await Bus.connect(
                trace_nats_url, role=user_of(trace_nats_url), name="bench-hop"
            ) as bus,
        ):
            await bus.subscribe(TRACE_SUBJECTS, lambda message: traces.on_message(message.data))
            for request in settings.workload.warmup(settings.num_warmup):
                await run_one(client, traces, request)
            return [
                await run_one(client, traces, settings.workload.request(number))
                for number in range(settings.num_requests)
            ]


def make_result(
    settings: HopSettings, hops: Sequence[RequestHops], machine: MachineNote
) -> BenchResult:
    """The figures of ``hops``: percentiles per hop and the sum of the three medians; and beside
    them what a worker does with a task until its engine has it."""
    spreads = {
        "bridge_to_prefill_ms": _spread([one.bridge_to_prefill_ms for one in hops]),
        "kv_ready_to_decode_ms": _spread([one.kv_ready_to_decode_ms for one in hops]),
        "token_to_client_ms": _spread([ms for one in hops for ms in one.token_to_client_ms]),
    }
    figures: dict[str, Figure] = {
        **spreads,
        "sum_of_p50_ms": round(sum(spread["p50"] for spread in spreads.values()), 4),
        "prefill_claim_ms": _spread([one.prefill_claim_ms for one in hops]),
        "decode_claim_ms": _spread([one.decode_claim_ms for one in hops]),
        "num_requests": len(hops),
    }
    is_own = not settings.nats_url
    notes = [
        "measuring points: client submits, workers receive, client holds the delta; no HTTP",
        "claim: the worker has the task until its engine has the request (decode: with its KV)",
    ]
    if is_own:
        notes.append("simulated engine at its greatest speed")
    return BenchResult(
        bench="hop",
        figures=figures,
        settings={
            "model": settings.model,
            "input_len": settings.input_len,
            "output_len": settings.output_len,
            "warmup": settings.num_warmup,
            "mesh": "own, simulated engine" if is_own else "running",
        },
        machine=machine,
        notes=tuple(notes),
    )


@asynccontextmanager
async def _bus_of(settings: HopSettings) -> AsyncGenerator[tuple[str, str], None]:
    if settings.nats_url:
        yield settings.nats_url, settings.trace_nats_url
        return
    from loadgen.bench.own_mesh import own_mesh

    flags = ("--engine", "simulated", "--prefill", "1", "--decode", "1")
    env = {TRACE_VARIABLE: "1", "MESH_WORKER_SPEED": INSTANT_SPEED}
    async with own_mesh(flags, env) as mesh:
        yield mesh.nats_url, mesh.control_nats_url


async def run_one(client: MeshClient, traces: HopTraces, request: LoadRequest) -> RequestHops:
    """Send one request, read its answer to the end, and wait for what the workers tell of it."""
    hops = traces.expect(request.request_id)
    deadline_unix_ms = client.bus.now_unix_ms() + int(REQUEST_TIMEOUT_S * 1e3)
    message = request.bus_message(deadline_unix_ms)
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        hops.submitted_ns = time.monotonic_ns()
        stream = await client.submit(message)
        while deltas := await stream.next_deltas():
            now_ns = time.monotonic_ns()
            for delta in deltas:
                hops.held_ns[delta.number] = now_ns
    return await traces.wait(request.request_id, TRACE_TIMEOUT_S)


def _spread(values_ms: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values_ms, (50, 99)).tolist()
    return {"p50": round(p50, 4), "p99": round(p99, 4)}
