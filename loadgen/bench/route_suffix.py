"""Section ``suffix`` of ``mesh bench route``: a short rest, computed where it is decoded.

Two meshes of one prefill and one decode worker with a thread each get the same questions by turns.
In one a decode worker that holds most of a prompt may compute the rest itself, whatever its length;
in the other all prompts go to the prefill worker, which holds as much. Some streams run meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from loadgen.bench.kv_ask import SERVED, ask, random_tokens
from loadgen.bench.own_mesh import OwnMesh, own_mesh
from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan, RouteSection
from loadgen.loop import fast_loop
from loadgen.measure import RequestResult

RESTS = (16, 32, 64, 128, 256)  # tokens
KNOWN_TOKENS = 512
_ANSWER_TOKENS = 8
_NUM_STREAMS = 4
_STREAM_TOKENS = 24  # of each stream that runs beside: longer than an answer takes
_STREAM_PROMPT = 32
_WORKERS = ("--prefill", "1", "--decode", "1", "--threads", "1")
_TOKENS, _HOLD = "MESH_CONTROL_ROUTE_SUFFIX_TOKENS", "MESH_CONTROL_ROUTE_SUFFIX_HOLD_MS"
_STAYS = {_TOKENS: "100000", _HOLD: "60000"}
_MOVES = {_TOKENS: "0"}


def measure(plan: RoutePlan) -> RouteSection:
    """``suffix``: by the rest's length, first token, eighth token and the longest gap of the
    streams beside it, stays ÷ moves, medians of pairs.

    Raises:
        LoadFailed: a request was not answered to its end.
        MeshNotStarted: there is no mesh to measure.
    """
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        figures = runner.run(_measure(plan))
    return RouteSection(
        figures={"suffix": figures},
        notes=(
            f"suffix: NOT simulated: {plan.model}, {' '.join(_WORKERS)}; {KNOWN_TOKENS} known "
            f"tokens and a rest, {_NUM_STREAMS} streams beside, {plan.turns} pairs of each; a rest "
            "computed by the decode worker ÷ by the prefill worker",
        ),
    )


async def _measure(plan: RoutePlan) -> dict[str, Figure]:
    rng = random.Random(5)
    figures: dict[str, Figure] = {}
    async with _meshes(plan.model) as meshes:
        for mesh in meshes:  # the first requests of a process are slower
            await _question(mesh, random_tokens(rng, KNOWN_TOKENS), rng, RESTS[0])
        for num_rest in RESTS:
            pairs = [await _pair(meshes, rng, num_rest, turn) for turn in range(plan.turns)]
            figures[str(num_rest)] = _ratios(pairs)
    return figures


@asynccontextmanager
async def _meshes(model: str) -> AsyncGenerator[tuple[OwnMesh, OwnMesh], None]:
    flags = ("--model", f"{SERVED}={model}", *_WORKERS)
    async with AsyncExitStack() as stack:
        stays = await stack.enter_async_context(own_mesh(flags, _STAYS))
        moves = await stack.enter_async_context(own_mesh(flags, _MOVES))
        yield stays, moves


_Times = tuple[float, float, float]  # ms: first token, last token, longest gap of another stream


async def _pair(
    meshes: tuple[OwnMesh, OwnMesh], rng: random.Random, num_rest: int, turn: int
) -> tuple[_Times, _Times]:
    """The same question to both, now one first, now the other."""
    known = random_tokens(rng, KNOWN_TOKENS)
    seed = rng.getrandbits(32)
    stays, moves = meshes
    found = {
        mesh.pid: await _question(mesh, known, random.Random(seed), num_rest)
        for mesh in ((stays, moves) if turn % 2 else (moves, stays))
    }
    return found[stays.pid], found[moves.pid]


async def _question(
    mesh: OwnMesh, known: tuple[int, ...], rng: random.Random, num_rest: int
) -> _Times:
    """Ask for ``known`` once, so that both workers hold it; then for a longer prompt, while some
    streams run."""
    await ask(mesh, known + random_tokens(rng, 1), 2)
    prompt = known + random_tokens(rng, num_rest)
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(ask(mesh, random_tokens(rng, _STREAM_PROMPT), _STREAM_TOKENS))
            for _ in range(_NUM_STREAMS)
        ]
        answer = await ask(mesh, prompt, _ANSWER_TOKENS)
    first_ms, last_ms = (
        (one - answer.sent_s) * 1e3 for one in (answer.event_s[0], answer.event_s[-1])
    )
    return first_ms, last_ms, max(_longest_gap_ms(stream.result()) for stream in streams)


def _longest_gap_ms(stream: RequestResult) -> float:
    gaps = [b - a for a, b in zip(stream.event_s, stream.event_s[1:], strict=False)]
    return max(gaps, default=0.0) * 1e3


def _ratios(pairs: list[tuple[_Times, _Times]]) -> dict[str, float]:
    """Medians of pairs, and of the times where the rest stays."""
    names = ("ttft", f"token_{_ANSWER_TOKENS}", "others_gap")
    ratios = {
        f"{name}_ratio": round(statistics.median(s[i] / max(m[i], 1e-3) for s, m in pairs), 3)
        for i, name in enumerate(names)
    }
    times = {
        f"{name}_ms": round(statistics.median(s[i] for s, _ in pairs), 1)
        for i, name in enumerate(names)
    }
    return ratios | times
