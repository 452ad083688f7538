"""Section ``real`` of ``mesh bench route``: the real engine, placed by score and at random.

Two meshes, each of two prefill and two decode workers with one thread, get the same chats by turns:
the trace ``real`` of ``loadgen/scenarios``, each time with other tokens, sent as fast as the mesh
answers with a few streams at a time. So what one mesh saves is time for its next prompts.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loadgen import scenarios
from loadgen.bench.own_mesh import own_mesh
from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan, RouteSection
from loadgen.bench.stream import LoadFailed
from loadgen.loop import fast_loop
from loadgen.measure import Summary, count_errors, summarize
from loadgen.recorder import Recorder
from loadgen.run import run_load
from loadgen.settings import LoadSettings

POLICIES = ("score", "random")
POLICY_VARIABLE = "MESH_CONTROL_ROUTE_POLICY"
_NAME = "real"  # the model's name in these meshes
_WORKERS = ("--prefill", "2", "--decode", "2", "--threads", "1")
_SCALE = 0.25  # of the trace's lengths
_MAX_LEN = 2_000  # tokens of prompt and answer
_STREAMS = 4
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A mesh and how it places."""

    policy: str
    url: str


def measure(plan: RoutePlan) -> RouteSection:
    """``real``: TTFT p50 and output tokens per second of both, and ratios of pairs of runs.

    Raises:
        LoadFailed: a request was not answered to its end.
        MeshNotStarted: there is no mesh to measure.
    """
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runs = runner.run(_measure(plan))
    return RouteSection(
        figures={"real": real_figures(runs)},
        notes=(
            f"real: NOT simulated: {plan.model}, {' '.join(_WORKERS)}, {_STREAMS} streams, "
            f"{plan.turns} runs each by turns, medians; ratios are score ÷ random, of pairs",
        ),
    )


def real_figures(runs: dict[str, list[Summary]]) -> dict[str, Figure]:
    """Medians over the runs of each policy; ratios of runs that had the same prompts."""
    ours, others = runs["score"], runs["random"]
    figures: dict[str, Figure] = {
        policy: {
            "ttft_p50_ms": round(statistics.median(_ttft_ms(one) for one in of_policy), 1),
            "output_tok_s": round(
                statistics.median(one.output_tokens_per_s for one in of_policy), 1
            ),
            "cached_share": round(statistics.median(map(_cached_share, of_policy)), 3),
        }
        for policy, of_policy in runs.items()
    }
    ttft = [_ttft_ms(a) / _ttft_ms(b) for a, b in zip(ours, others, strict=True)]
    output = [
        a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(ours, others, strict=True)
    ]
    figures["ttft_ratio"] = _spread(ttft)
    figures["output_ratio"] = _spread(output)
    return figures


async def _measure(plan: RoutePlan) -> dict[str, list[Summary]]:
    async with _meshes(plan.model) as servers:
        runs: dict[str, list[Summary]] = {server.policy: [] for server in servers}
        for turn in range(plan.turns):
            for server in servers if turn % 2 else servers[::-1]:
                runs[server.policy].append(await _run(server, turn, plan))
    return runs


@asynccontextmanager
async def _meshes(model: str) -> AsyncGenerator[list[Server], None]:
    """Both, idle while the other one is measured."""
    async with AsyncExitStack() as stack:
        servers = []
        for policy in POLICIES:
            flags = ("--model", f"{_NAME}={model}", *_WORKERS)
            mesh = await stack.enter_async_context(own_mesh(flags, {POLICY_VARIABLE: policy}))
            servers.append(Server(policy=policy, url=mesh.url))
        yield servers


async def _run(server: Server, turn: int, plan: RoutePlan) -> Summary:
    load = LoadSettings(
        target=server.url,
        model=_NAME,
        trace=scenarios.trace_file("real"),
        trace_scale=_SCALE,
        max_len=_MAX_LEN,
        concurrency=_STREAMS,
        num_requests=max(1, round(60 * plan.length)),
        seed=turn,
        warmup=_STREAMS,
        timeout_s=_TIMEOUT_S,
        drain_s=_TIMEOUT_S,
    )
    recorder = Recorder()
    await run_load(load, recorder, _ignore)
    summary = summarize(recorder.results, wall_s=recorder.wall_s)
    if not 0 < summary.num_completed == summary.num_sent:
        kinds = count_errors(recorder.results)
        first = next((f"{kind}: {one.example}" for kind, one in kinds.items()), "no end in time")
        raise LoadFailed(f"{server.policy} did not answer all requests: {first}")
    return summary


def _ttft_ms(summary: Summary) -> float:
    assert summary.ttft_ms.p50 is not None, "a run with requests has one"
    return summary.ttft_ms.p50


def _cached_share(summary: Summary) -> float:
    return summary.num_cached_tokens / max(1, summary.num_prompt_tokens)


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "greatest": round(max(ratios), 3),
    }


def _ignore(recorder: Recorder) -> None:
    """Nobody watches the progress."""
