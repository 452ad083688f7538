"""``mesh load`` and ``mesh bench``: flags to settings; everything heavy is imported when used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench import BENCHES
from schemas.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from loadgen.recorder import Recorder
    from loadgen.settings import LoadSettings

DEFAULT_DURATION_S = 30.0

load_app = typer.Typer(add_completion=False)


@load_app.callback(invoke_without_command=True)
def load(
    context: typer.Context,
    target: Annotated[
        str, typer.Option(help="http://host:port, or nats://user:password@host:port for the bus")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="model to ask for")] = "smollm2-135m",
    rate: Annotated[
        float | None, typer.Option(help="open loop: requests per second, Poisson")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="closed loop: requests at a time")] = None,
    duration: Annotated[
        float | None, typer.Option(help="seconds to send for; 30 without --requests")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="requests to send at most")] = None,
    input_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 128,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="which HTTP endpoint")
    ] = "completions",
    prompt: Annotated[
        Literal["ids", "words"] | None,
        typer.Option(help="random token ids, or words (chat always takes words)"),
    ] = None,
    vocab: Annotated[str, typer.Option(help="half-open range of prompt token ids")] = "1000:20000",
    seed: Annotated[int, typer.Option(help="of prompts and arrivals")] = 0,
    warmup: Annotated[int, typer.Option(help="requests sent before measuring")] = 1,
    timeout: Annotated[float, typer.Option(help="seconds for one request")] = 120.0,
    drain: Annotated[float, typer.Option(help="seconds to wait for the last requests")] = 30.0,
    max_in_flight: Annotated[int, typer.Option(help="open loop: skip what exceeds it")] = 1024,
    slo: Annotated[str, typer.Option(help="limits in ms for goodput: ttft:500,tpot:50,e2e:…")] = "",
    api_key: Annotated[str, typer.Option(envvar="MESH_API_KEY", show_envvar=True)] = "",
    json: Annotated[Path | None, typer.Option(help="write the report there, too")] = None,
) -> None:
    """Send requests in an open loop (--rate) or a closed loop (--concurrency) and measure.

    Ctrl-C ends the run early and shows what was measured until then.
    """
    if context.invoked_subcommand is not None:
        return
    from loadgen.settings import MAX_DURATION_S, MAX_REQUESTS, LoadSettings, parse_slo, parse_vocab

    if duration is None:
        duration = DEFAULT_DURATION_S if requests is None else MAX_DURATION_S
    try:
        settings = LoadSettings(
            target=target,
            model=model,
            rate=rate,
            concurrency=concurrency,
            duration_s=duration,
            num_requests=MAX_REQUESTS if requests is None else requests,
            input_len=input_len,
            output_len=output_len,
            endpoint=endpoint,
            prompt=prompt or ("words" if endpoint == "chat" else "ids"),
            vocab=parse_vocab(vocab),
            seed=seed,
            warmup=warmup,
            timeout_s=timeout,
            drain_s=drain,
            max_in_flight=max_in_flight,
            slo_ms=parse_slo(slo),
            api_key=api_key,
        )
        _check_writable(json)
    except ConfigError as error:
        raise typer.Exit(report("mesh load", error)) from error
    raise typer.Exit(_load(settings, json))


def _load(settings: LoadSettings, json: Path | None) -> int:
    """Run, show and write; the exit code: 0 when any request was answered."""
    from rich.console import Console

    from loadgen.machine import MachineNote
    from loadgen.recorder import Recorder
    from loadgen.report import make_report, print_report, write_json

    machine, recorder = MachineNote.now(), Recorder()
    code = _run(settings, recorder)
    if recorder.started_s is None:
        return code
    result = make_report(settings, recorder, machine, is_interrupted=code == EXIT_INTERRUPTED)
    print_report(result, Console())
    if json is not None:
        write_json(result, json)
    return code or (0 if result.summary.num_completed else EXIT_FAILED)


def _run(settings: LoadSettings, recorder: Recorder) -> int:
    import asyncio

    from rich.console import Console

    from loadgen.loop import fast_loop
    from loadgen.progress import progress_bar
    from loadgen.run import run_load

    try:
        with (
            progress_bar(settings, Console(stderr=True)) as on_tick,
            asyncio.Runner(loop_factory=fast_loop()) as runner,
        ):
            runner.run(run_load(settings, recorder, on_tick))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        return report("mesh load", ours)
    return 0


def _check_writable(json: Path | None) -> None:
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"no folder for {json}", param="json")


class _BenchGroup(TyperGroup):
    """Imports a bench when it is asked for: see ``loadgen.bench``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in BENCHES:
            return None
        module = importlib.import_module(BENCHES[cmd_name])
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(module.command)
        return typer.main.get_command(app)


bench_app = typer.Typer(cls=_BenchGroup, add_completion=False, no_args_is_help=True)


@bench_app.callback()
def _bench() -> None:
    """Measure one part of the mesh on this machine."""
