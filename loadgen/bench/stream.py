"""``mesh bench stream``: what a streamed token costs, and how fast many streams are.

The load comes from a process of its own (``loadgen.bench.sse_load``) over HTTP, to a mesh of our
own with a simulated engine: the engine's work is a hash, so what is measured is the way of a token
from an engine's step to the client. With ``--peer-url`` another OpenAI-compatible server gets the
same load in the same run, in turn with the mesh, and ratios are told.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
import typer

from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.processes import ProcessGroup, pids_by_kind
from loadgen.bench.result import BenchResult, Figure
from loadgen.bench.sse_load import LoadFigures, LoadOrder
from loadgen.bench.stream_mesh import Server, StreamSettings, own_server
from loadgen.bench.stream_samples import Samples, ratios
from loadgen.machine import MachineNote
from schemas.errors import ConfigError, MeshError

_BUSY_CLIENT = 0.9  # of a core: then the load may be what limits
_ORDER_S = 300.0
_WARMUP_REQUESTS = 2  # per stream


class LoadFailed(MeshError):
    """Requests of the bench were not answered."""

    code = "load_failed"


class LoadProcess:
    """The process that sends the load; one order at a time."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child
        self._next_number = 1

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncGenerator[LoadProcess, None]:
        """Runs while the block does."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "loadgen.bench.sse_load",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            yield cls(child)
        finally:
            if child.returncode is None:
                child.kill()
            await child.wait()

    async def run(
        self, server: Server, settings: StreamSettings, num_streams: int, per_stream: int
    ) -> LoadFigures:
        """Send ``per_stream`` requests for each of ``num_streams`` streams.

        Raises:
            LoadFailed: one of them was not answered to its end.
        """
        order = LoadOrder(
            url=server.url,
            model=server.model,
            num_streams=num_streams,
            num_requests=num_streams * per_stream,
            input_len=settings.input_len,
            output_len=settings.output_len,
            first_number=self._next_number,
        )
        self._next_number += order.num_requests
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        async with asyncio.timeout(_ORDER_S):
            line = await self._child.stdout.readline()
        if not line:
            raise LoadFailed("the load's process ended")
        figures = msgspec.json.decode(line, type=LoadFigures)
        if figures.num_failed:
            raise LoadFailed(
                f"{figures.num_failed} of {order.num_requests} requests to {server.name} failed: "
                f"{figures.error}"
            )
        return figures


def command(
    streams: Annotated[
        list[int] | None, typer.Option(help="streams at a time; may be repeated  [64]")
    ] = None,
    repeats: Annotated[int, typer.Option(help="runs, of which medians are told")] = 5,
    requests: Annotated[int, typer.Option(help="requests per stream and run")] = 4,
    input_len: Annotated[int, typer.Option(help="words of a prompt")] = 128,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    speed: Annotated[
        float, typer.Option(help="the simulated engine's modelled times are divided by this")
    ] = 500.0,
    split: Annotated[
        bool, typer.Option("--split", help="one prefill and one decode worker, not one for both")
    ] = False,
    controls: Annotated[int, typer.Option(help="control processes")] = 1,
    peer_url: Annotated[
        str, typer.Option(help="another OpenAI-compatible server to send the same load to")
    ] = "",
    peer_model: Annotated[str, typer.Option(help="its model's name")] = "",
    peer_pid: Annotated[
        list[str] | None, typer.Option(help="NAME=PID of its processes; may be repeated")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Stream many answers at once through a mesh of its own, simulated engine, and count the CPU.

    A chunk is a streamed token. With several --streams, or a peer, figures stand per number of
    streams and server.
    """
    machine = MachineNote.now()
    try:
        settings = StreamSettings(
            streams=tuple(streams or (64,)),
            repeats=repeats,
            requests_per_stream=requests,
            input_len=input_len,
            output_len=output_len,
            speed=speed,
            is_split=split,
            controls=controls,
        )
        peer = _peer(peer_url, peer_model, peer_pid or [])
        samples = asyncio.run(measure(settings, peer))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench stream", ours)) from error
    make_result(settings, samples, machine, peer).show(as_json=json)


def _peer(url: str, model: str, pids: Sequence[str]) -> Server | None:
    if not url:
        if model or pids:
            raise ConfigError("a peer needs --peer-url", param="peer_url")
        return None
    if not model or not pids:
        raise ConfigError("a peer needs --peer-model and --peer-pid", param="peer_pid")
    return Server(name="peer", url=url, model=model, processes=ProcessGroup(pids_by_kind(pids)))


async def measure(
    settings: StreamSettings, peer: Server | None = None
) -> dict[str, dict[int, Samples]]:
    """Runs by server and number of streams; servers take turns within each run.

    Raises:
        LoadFailed: a request was not answered to its end.
        MeshNotStarted: there is no mesh to measure.
    """
    async with own_server(settings) as mesh, LoadProcess.started() as load:
        servers = [mesh] if peer is None else [mesh, peer]
        samples = {s.name: {count: Samples() for count in settings.streams} for s in servers}
        for count in settings.streams:
            for server in servers:
                await load.run(server, settings, count, _WARMUP_REQUESTS)
            for _ in range(settings.repeats):
                for server in servers:
                    await _run_once(load, server, settings, count, samples[server.name][count])
        return samples


async def _run_once(
    load: LoadProcess, server: Server, settings: StreamSettings, count: int, samples: Samples
) -> None:
    before_s = server.processes.cpu_s()
    figures = await load.run(server, settings, count, settings.requests_per_stream)
    samples.cpu_s.append(server.processes.since(before_s))
    samples.loads.append(figures)
    samples.num_tokens.append(figures.num_completed * settings.output_len)


def make_result(
    settings: StreamSettings,
    samples: dict[str, dict[int, Samples]],
    machine: MachineNote,
    peer: Server | None,
) -> BenchResult:
    """One number of streams and no peer: the figures themselves; else an entry for each, and the
    ratios of mesh to peer."""
    tables = {
        name: {count: one.figures() for count, one in by_count.items()}
        for name, by_count in samples.items()
    }
    figures: dict[str, Figure] = {}
    if peer is None and len(settings.streams) == 1:
        figures |= tables["mesh"][settings.streams[0]]
    else:
        for count in settings.streams:
            for name, table in tables.items():
                figures[f"{name}_{count}"] = table[count]
            if peer is not None:
                figures[f"ratio_{count}"] = ratios(samples["mesh"][count], samples["peer"][count])
    return BenchResult(
        bench="stream",
        figures=figures,
        settings=msgspec.to_builtins(settings) | {"peer": peer.url if peer else ""},
        machine=machine,
        notes=tuple(_notes(samples)),
    )


def _notes(samples: dict[str, dict[int, Samples]]) -> list[str]:
    notes = [
        "simulated engine: its times are modelled, its tokens from a hash",
        "spread: (largest - smallest) / median over the runs",
        "cpu: user and system time of the server's processes, per streamed token",
    ]
    for name, by_count in samples.items():
        for count, one in by_count.items():
            busiest = max(load.cpu_s / load.wall_s for load in one.loads)
            if busiest > _BUSY_CLIENT:
                notes.append(f"{name}, {count} streams: the load's own process was at its limit")
    return notes
