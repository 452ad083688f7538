"""``mesh load`` and ``mesh bench``: flags to settings; everything heavy is imported when used."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench import BENCHES
from schemas.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from loadgen.recorder import Recorder
    from loadgen.report import LoadReport
    from loadgen.run import Watched
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
    ramp_to: Annotated[
        float | None, typer.Option(help="the rate goes there evenly over --duration")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="of arrivals: 1 is Poisson, less comes in bursts, inf is a clock")
    ] = 1.0,
    concurrency: Annotated[int | None, typer.Option(help="closed loop: requests at a time")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSONL of requests (Mooncake's form): sent at their times"),
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="a trace so many times as fast")] = 1.0,
    trace_scale: Annotated[float, typer.Option(help="a trace's lengths times this")] = 1.0,
    max_len: Annotated[
        int | None, typer.Option(help="a trace's prompt and answer are cut to it")
    ] = None,
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
    tenant_key: Annotated[
        list[str] | None, typer.Option(help="NAME=KEY: the API key of a trace's tenant")
    ] = None,
    watch: Annotated[
        str | None, typer.Option(help="data directory of a mesh: also show times inside it")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the report there, too")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with plots there")] = None,
    markdown: Annotated[Path | None, typer.Option(help="write Markdown tables there")] = None,
) -> None:
    """Send requests in an open loop (--rate, --trace) or a closed one (--concurrency) and measure.

    Ctrl-C ends the run early and shows what was measured until then.
    """
    if context.invoked_subcommand is not None:
        return
    from loadgen.settings import (
        MAX_DURATION_S,
        MAX_LEN,
        MAX_REQUESTS,
        LoadSettings,
        parse_slo,
        parse_tenant_keys,
        parse_vocab,
    )

    if duration is None:
        has_end = requests is not None or trace is not None
        duration = MAX_DURATION_S if has_end else DEFAULT_DURATION_S
    try:
        settings = LoadSettings(
            target=target,
            model=model,
            rate=rate,
            ramp_to=ramp_to,
            burstiness=burstiness,
            concurrency=concurrency,
            trace=trace,
            trace_speed=trace_speed,
            trace_scale=trace_scale,
            max_len=MAX_LEN if max_len is None else max_len,
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
            tenant_keys=parse_tenant_keys(tenant_key or ()),
        )
        outputs = Outputs(json=json, html=html, markdown=markdown)
    except ConfigError as error:
        raise typer.Exit(report("mesh load", error)) from error
    raise typer.Exit(_load(settings, outputs, watch))


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files to write a report to.

    Raises:
        ConfigError: there is no such folder, or plots can't be drawn here.
    """

    json: Path | None
    html: Path | None
    markdown: Path | None

    def __post_init__(self) -> None:
        for name in ("json", "html", "markdown"):
            path = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"no folder for {path}", param=name)
        if self.html is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("plots need matplotlib: install the extra [report]", param="html")

    def write(self, report: LoadReport, recorder: Recorder) -> None:
        """Write them."""
        from loadgen.report import write_json

        if self.json is not None:
            write_json(report, self.json)
        if self.markdown is not None:
            from loadgen.markdown_report import write_markdown

            write_markdown(report, self.markdown)
        if self.html is not None:
            from loadgen.html_report import write_html

            write_html(report, recorder, self.html)


def _load(settings: LoadSettings, outputs: Outputs, watch: str | None) -> int:
    """Run, show and write; the exit code: 0 when any request was answered."""
    from rich.console import Console

    from loadgen.machine import MachineNote
    from loadgen.recorder import Recorder
    from loadgen.report import make_report, print_report
    from loadgen.run import Watched

    machine, recorder, watched = MachineNote.now(), Recorder(), Watched(data=watch)
    code = _run(settings, recorder, watched)
    if recorder.started_s is None:
        return code
    result = make_report(
        settings,
        recorder,
        machine,
        is_interrupted=code == EXIT_INTERRUPTED,
        stages=watched.stages,
    )
    print_report(result, Console())
    outputs.write(result, recorder)
    return code or (0 if result.summary.num_completed else EXIT_FAILED)


def _run(settings: LoadSettings, recorder: Recorder, watched: Watched) -> int:
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
            runner.run(run_load(settings, recorder, on_tick, watched))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        return report("mesh load", ours)
    return 0


@load_app.command("make-trace")
def make_trace(
    out: Annotated[Path, typer.Option(help="file to write, one request per line")],
    kind: Annotated[
        Literal["no-reuse", "shared-prefix", "chat", "assistants", "heavy-tail", "tenants"],
        typer.Option(help="what the requests have in common"),
    ] = "shared-prefix",
    requests: Annotated[int, typer.Option(help="how many")] = 1000,
    rate: Annotated[float, typer.Option(help="requests per second")] = 10.0,
    burstiness: Annotated[float, typer.Option(help="of arrivals; 1 is Poisson")] = 1.0,
    input_len: Annotated[
        int, typer.Option(help="mean tokens of a prompt (chat, assistants: of a turn)")
    ] = 2048,
    output_len: Annotated[int, typer.Option(help="mean tokens of an answer")] = 128,
    seed: Annotated[int, typer.Option(help="the same seed makes the same trace")] = 0,
) -> None:
    """Make up a trace, in the form that --trace takes."""
    from loadgen.synthetic import SyntheticSettings, synthesize
    from loadgen.traces import write_trace

    try:
        settings = SyntheticSettings(
            kind=kind,
            num_requests=requests,
            rate=rate,
            burstiness=burstiness,
            input_len=input_len,
            output_len=output_len,
            seed=seed,
        )
        num_written = write_trace(synthesize(settings), out)
    except ConfigError as error:
        raise typer.Exit(report("mesh load make-trace", error)) from error
    typer.echo(f"{num_written} requests in {out}")


@load_app.command("compare")
def compare(
    first: Annotated[Path, typer.Argument(help="a report that mesh load --json wrote")],
    second: Annotated[Path, typer.Argument(help="another one")],
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout")] = False,
) -> None:
    """Set the second run's figures against the first's."""
    import msgspec
    from rich.console import Console

    from loadgen.compare import compare as set_against
    from loadgen.compare import render
    from loadgen.report import read_json

    try:
        comparison = set_against(read_json(first), read_json(second))
    except ConfigError as error:
        raise typer.Exit(report("mesh load compare", error)) from error
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(comparison), indent=2).decode())
        return
    console = Console()
    for line in (
        *(f"not the same load: {one}" for one in comparison.differences),
        *comparison.warnings,
    ):
        console.print(f"warning: {line}", style="yellow", markup=False)
    console.print(render(comparison))


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
