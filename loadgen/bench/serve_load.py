"""The load of ``mesh bench serve``: streams of one shape, alone or beside long prompts."""

from __future__ import annotations

from dataclasses import dataclass

from infra.task_scope import task_scope
from loadgen.bench.stream import LoadFailed
from loadgen.measure import Summary, count_errors, summarize
from loadgen.recorder import Recorder
from loadgen.run import run_load
from loadgen.settings import LoadSettings
from schemas.errors import ConfigError

NUM_RUNNING = 8  # streams that long prompts disturb
RUNNING_INPUT_LEN = 32
RUNNING_OUTPUT_LEN = 200
_TIMEOUT_S = 300.0
_WARMUP_REQUESTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What to serve and to send. ``long_prompt`` 0: nothing is measured beside long prompts.

    Raises:
        ConfigError: a number out of its range.
    """

    model: str  # NAME=SOURCE
    dtype: str
    streams: tuple[int, ...]
    repeats: int
    requests_per_stream: int
    input_len: int
    output_len: int
    vocab: tuple[int, int]
    long_prompt: int
    num_cores: int

    def __post_init__(self) -> None:
        numbers = {
            "streams": (min(self.streams, default=0), 1),
            "repeats": (self.repeats, 1),
            "requests": (self.requests_per_stream, 1),
            "input_len": (self.input_len, 1),
            "output_len": (self.output_len, 2),  # with one token there is no gap
            "long_prompt": (self.long_prompt, 0),
        }
        for name, (value, least) in numbers.items():
            if value < least:
                raise ConfigError(f"{name} is {value}, it must be at least {least}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Who is measured, and the model's name there."""

    name: str
    url: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """One run of one server: tokens of all answers per second, medians over them."""

    output_tok_s: float
    ttft_p50_ms: float
    itl_p50_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Gaps of running streams while long prompts came, and how many of those were answered."""

    itl_p50_ms: float
    itl_p99_ms: float
    prompts_per_s: float


async def run_streams(
    settings: ServeSettings, server: Server, num_streams: int, turn: int
) -> ServeRun:
    """Keep ``num_streams`` streams running; prompts differ from turn to turn.

    Raises:
        LoadFailed: a request was not answered to its end.
    """
    load = LoadSettings(
        target=server.url,
        model=server.model,
        concurrency=num_streams,
        num_requests=num_streams * settings.requests_per_stream,
        input_len=settings.input_len,
        output_len=settings.output_len,
        vocab=settings.vocab,
        seed=1000 * turn + num_streams,
        warmup=min(num_streams, _WARMUP_REQUESTS),
        timeout_s=_TIMEOUT_S,
        drain_s=_TIMEOUT_S,
    )
    summary = await _run(load, server)
    return ServeRun(
        output_tok_s=summary.output_tokens_per_s,
        ttft_p50_ms=_known(summary.ttft_ms.p50),
        itl_p50_ms=_known(summary.itl_ms.p50),
    )


async def run_interference(settings: ServeSettings, server: Server, turn: int) -> Interference:
    """Let streams run, and as long as they do one prompt of ``long_prompt`` tokens after the other.

    Raises:
        LoadFailed: a stream was not answered to its end, or no long prompt was.
    """
    running = LoadSettings(
        target=server.url,
        model=server.model,
        concurrency=NUM_RUNNING,
        num_requests=NUM_RUNNING,
        input_len=RUNNING_INPUT_LEN,
        output_len=RUNNING_OUTPUT_LEN,
        vocab=settings.vocab,
        seed=1000 * turn,
        timeout_s=_TIMEOUT_S,
        drain_s=_TIMEOUT_S,
    )
    arriving = LoadSettings(
        target=server.url,
        model=server.model,
        concurrency=1,
        input_len=settings.long_prompt,
        output_len=1,
        vocab=settings.vocab,
        seed=1000 * turn + 1,
        timeout_s=_TIMEOUT_S,
    )
    recorder = Recorder()
    async with task_scope() as tasks:
        tasks.create_task(run_load(arriving, recorder, _ignore), name="long prompts")
        summary = await _run(running, server)
    prompts = summarize(recorder.results, wall_s=recorder.wall_s)
    if prompts.num_failed or not prompts.num_completed:
        raise LoadFailed(f"no long prompt was answered by {server.name}: {_first(recorder)}")
    return Interference(
        itl_p50_ms=_known(summary.itl_ms.p50),
        itl_p99_ms=_known(summary.itl_ms.p99),
        prompts_per_s=prompts.requests_per_s,
    )


async def _run(load: LoadSettings, server: Server) -> Summary:
    recorder = Recorder()
    await run_load(load, recorder, _ignore)
    summary = summarize(recorder.results, wall_s=recorder.wall_s)
    if summary.num_completed < load.num_requests:
        missing = load.num_requests - summary.num_completed
        raise LoadFailed(f"{missing} requests to {server.name} failed: {_first(recorder)}")
    return summary


def _first(recorder: Recorder) -> str:
    for kind, count in count_errors(recorder.results).items():
        return f"{kind}: {count.example}"
    return "it did not end in time"


def _known(value_ms: float | None) -> float:
    assert value_ms is not None, "every request completed, with two tokens or more"
    return value_ms


def _ignore(recorder: Recorder) -> None:
    """Nobody watches the progress."""
