"""Section ``prefix`` of ``mesh bench kv``: a known beginning on the worker that computed it.

    device   the engine's own memory has it
    host     that memory was too small since, host memory has it
    reuse    nothing is ever used again: what keeping it costs

Known and new prompts take turns, so that a change of the machine's speed meets both.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from loadgen.bench.kv import KvPlan, KvSection
from loadgen.bench.kv_ask import (
    NEW_TOKENS,
    SERVED,
    SHARED_TOKENS,
    ask,
    by_turns,
    random_tokens,
)
from loadgen.bench.own_mesh import OwnMesh, own_mesh
from loadgen.bench.result import Figure
from loadgen.loop import fast_loop

_SMALL_POOL = "64MiB"  # room for three such prompts of the default model
_FLUSH = 4  # prompts, at least, between a known one and its return
_STREAMS = 8
_INPUT_LEN = 256
_OUTPUT_LEN = 32
_NOTES = (
    f"prefix: {SHARED_TOKENS} shared + {NEW_TOKENS} new tokens, TTFT at the client, known ÷ new, "
    "by turns; medians of pairs",
    f"no_reuse_overhead: {_STREAMS} streams of {_INPUT_LEN} + {_OUTPUT_LEN} tokens, two meshes by "
    "turns, with a host tier ÷ without one; the router's index is part of both",
)


def measure(plan: KvPlan) -> KvSection:
    """``prefix_ttft_ratio`` by tier (the greater of the two), ``no_reuse_overhead``.

    Raises:
        LoadFailed: a request failed, or a known prompt was computed again.
        MeshNotStarted: there is no mesh to measure.
    """
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        return runner.run(_measure(plan))


async def _measure(plan: KvPlan) -> KvSection:
    device = await _known_and_new(plan.model, plan.turns, ())
    host = await _known_and_new(plan.model, max(plan.turns, _FLUSH), ("--kv-memory", _SMALL_POOL))
    overhead = await _overhead(plan)
    return KvSection(
        figures={
            "prefix_ttft_ratio": max(device["ratio"], host["ratio"]),
            "prefix_ttft": {"device": device, "host": host},
            "no_reuse_overhead": overhead,
        },
        notes=_NOTES,
    )


async def _known_and_new(model: str, turns: int, flags: Sequence[str]) -> dict[str, float]:
    """All known prompts once, then each again beside one that is new."""
    rng = random.Random(7)
    known = [random_tokens(rng, SHARED_TOKENS) for _ in range(turns)]
    async with own_mesh((*_flags(model), *flags)) as mesh:
        for beginning in known:
            await ask(mesh, beginning + random_tokens(rng, NEW_TOKENS))
        return await by_turns(mesh, known, rng)


async def _overhead(plan: KvPlan) -> Figure:
    """Tokens per second with a host tier ÷ without one, the median over pairs."""
    rng = random.Random(11)
    ratios = []
    async with AsyncExitStack() as stack:
        on = await stack.enter_async_context(own_mesh(_flags(plan.model)))
        off = await stack.enter_async_context(
            own_mesh(_flags(plan.model), {"MESH_WORKER_KV_HOST_MEMORY": "0"})
        )
        await _batch_s(on, rng)  # the first requests of a process are slower
        await _batch_s(off, rng)
        for turn in range(plan.turns):
            first, second = (on, off) if turn % 2 else (off, on)
            took_s = {
                first.pid: await _batch_s(first, rng),
                second.pid: await _batch_s(second, rng),
            }
            ratios.append(took_s[off.pid] / took_s[on.pid])
    return round(statistics.median(ratios), 4)


async def _batch_s(mesh: OwnMesh, rng: random.Random) -> float:
    """How long as many new prompts take together as there are streams."""
    prompts = [random_tokens(rng, _INPUT_LEN) for _ in range(_STREAMS)]
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(ask(mesh, prompt, _OUTPUT_LEN))
    return time.perf_counter() - started_s


def _flags(model: str) -> tuple[str, ...]:
    return ("--model", f"{SERVED}={model}", "--both", "1")
