"""``mesh bench serve``: real answers through the bridge, in both layouts, beside another server.

    both     one worker for prefill and decode, with all cores' threads
    split    one prefill and one decode worker, half of the threads each

Both meshes, and with ``--peer-url`` another OpenAI-compatible server, get the same load by turns:
prompts of random tokens, greedy answers of a fixed length. How the load is made is in
``loadgen.bench.serve_load``.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

import msgspec
import typer

from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.own_mesh import own_mesh
from loadgen.bench.result import BenchResult, Figure
from loadgen.bench.serve_load import (
    Interference,
    Server,
    ServeRun,
    ServeSettings,
    run_interference,
    run_streams,
)
from loadgen.loop import fast_loop
from loadgen.machine import MachineNote
from loadgen.settings import parse_vocab
from schemas.errors import ConfigError, MeshError

PEER = "peer"
LAYOUTS = {"both": ("--both", "1"), "split": ("--prefill", "1", "--decode", "1")}
_NOTES = (
    "client: request handed over -> token event read, through the bridge",
    "bridge: ours / peer's; above 1 is better for output, below 1 for ttft and itl",
)

Runs = dict[str, dict[int, list[ServeRun]]]


def command(
    model: Annotated[
        str, typer.Option(help="a model to serve, NAME=SOURCE")
    ] = "smollm2-135m=smollm2-135m",
    dtype: Annotated[str, typer.Option(help="of the workers")] = "auto",
    streams: Annotated[str, typer.Option(help="streams at a time")] = "1,8,32",
    repeats: Annotated[int, typer.Option(help="runs of each, by turns; medians are told")] = 3,
    requests: Annotated[int, typer.Option(help="requests per stream and run")] = 2,
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    vocab: Annotated[str, typer.Option(help="half-open range of prompt token ids")] = "1000:20000",
    peer_url: Annotated[
        str, typer.Option(help="another OpenAI-compatible server with the same model")
    ] = "",
    peer_model: Annotated[str, typer.Option(help="the model's name there")] = "smollm2",
    interference: Annotated[
        bool, typer.Option(help="measure running streams while long prompts keep arriving")
    ] = True,
    long_prompt: Annotated[int, typer.Option(help="tokens of such a prompt")] = 1000,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Stream answers through meshes of its own in both layouts, and through another server."""
    machine = MachineNote.now()
    try:
        settings = ServeSettings(
            model=model,
            dtype=dtype,
            streams=_numbers(streams),
            repeats=repeats,
            requests_per_stream=requests,
            input_len=input_len,
            output_len=output_len,
            vocab=parse_vocab(vocab),
            long_prompt=long_prompt if interference else 0,
            num_cores=machine.num_cores,
        )
        peer = Server(name=PEER, url=peer_url, model=peer_model) if peer_url else None
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            runs, interfered = runner.run(measure(settings, peer))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench serve", ours)) from error
    make_result(settings, runs, interfered, machine, peer_url).show(as_json=json)


async def measure(
    settings: ServeSettings, peer: Server | None = None
) -> tuple[Runs, dict[str, list[Interference]]]:
    """Runs by server and number of streams, and those with long prompts by layout.

    Raises:
        LoadFailed: a request was not answered to its end.
        MeshNotStarted: there is no mesh to measure.
    """
    async with _layouts(settings) as ours:
        servers = [*ours, peer] if peer else ours
        runs: Runs = {one.name: {num: [] for num in settings.streams} for one in servers}
        interfered: dict[str, list[Interference]] = {one.name: [] for one in ours}
        for turn in range(settings.repeats):
            for num_streams in settings.streams:
                for server in servers:
                    run = await run_streams(settings, server, num_streams, turn)
                    runs[server.name][num_streams].append(run)
            for server in ours if settings.long_prompt else ():
                interfered[server.name].append(await run_interference(settings, server, turn))
    return runs, interfered


def make_result(
    settings: ServeSettings,
    runs: Runs,
    interfered: Mapping[str, Sequence[Interference]],
    machine: MachineNote,
    peer_url: str = "",
) -> BenchResult:
    """A table per number of streams; ratios to the peer under ``bridge``; what separate workers
    are for under ``interference_itl_p99_ratio``. Ratios are medians over pairs of runs."""
    figures: dict[str, Figure] = {}
    for num_streams in settings.streams:
        for name, by_streams in runs.items():
            figures[f"{name}_{num_streams}"] = _medians(by_streams[num_streams])
    if PEER in runs:
        figures["bridge"] = {
            f"{name}_{num_streams}_{what}": ratio
            for name in LAYOUTS
            for num_streams in settings.streams
            for what, ratio in _ratios(runs[name][num_streams], runs[PEER][num_streams]).items()
        }
    if settings.long_prompt:
        figures |= _interference(interfered)
    return BenchResult(
        bench="serve",
        figures=figures,
        settings=msgspec.to_builtins(settings) | {"peer": peer_url},
        machine=machine,
        notes=_NOTES if PEER in runs else _NOTES[:1],
    )


def _medians(runs: Sequence[ServeRun]) -> dict[str, float]:
    return {
        name: round(statistics.median(getattr(run, name) for run in runs), 3)
        for name in ("output_tok_s", "ttft_p50_ms", "itl_p50_ms")
    }


def _ratios(ours: Sequence[ServeRun], peers: Sequence[ServeRun]) -> dict[str, float]:
    short = {"output": "output_tok_s", "ttft": "ttft_p50_ms", "itl": "itl_p50_ms"}
    pairs = list(zip(ours, peers, strict=True))
    return {
        what: round(statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs), 3)
        for what, name in short.items()
    }


def _interference(runs: Mapping[str, Sequence[Interference]]) -> dict[str, Figure]:
    pairs = zip(runs["split"], runs["both"], strict=True)
    ratio = statistics.median(split.itl_p99_ms / both.itl_p99_ms for split, both in pairs)
    names = {"itl_p50_ms": "itl_p50_ms", "itl_p99_ms": "itl_p99_ms", "prompts_s": "prompts_per_s"}
    figures: dict[str, Figure] = {
        f"interference_{shown}": {
            layout: round(statistics.median(getattr(run, name) for run in of_layout), 3)
            for layout, of_layout in runs.items()
        }
        for shown, name in names.items()
    }
    return {"interference_itl_p99_ratio": round(ratio, 3), **figures}


@asynccontextmanager
async def _layouts(settings: ServeSettings) -> AsyncGenerator[list[Server], None]:
    """Both meshes, idle while the other one is measured."""
    threads = {"both": settings.num_cores, "split": max(1, settings.num_cores // 2)}
    async with AsyncExitStack() as stack:
        servers = []
        for name, workers in LAYOUTS.items():
            flags = ("--model", settings.model, "--dtype", settings.dtype, *workers)
            mesh = await stack.enter_async_context(
                own_mesh((*flags, "--threads", str(threads[name])))
            )
            served = settings.model.partition("=")[0]
            servers.append(Server(name=name, url=mesh.url, model=served))
        yield servers


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form 1,8,32", param="streams") from None
