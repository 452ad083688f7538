"""Section ``disk`` of ``mesh bench kv``: a known prompt after a restart.

A mesh of one worker answers prompts and is stopped; the next one with the same directory answers
others that begin alike, and by turns ones that nobody has asked. Files may still be in the page
cache, as they are after any restart but that of the machine.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from loadgen.bench.kv import KvPlan, KvSection
from loadgen.bench.kv_ask import (
    NEW_TOKENS,
    SERVED,
    SHARED_TOKENS,
    ask,
    by_turns,
    random_tokens,
)
from loadgen.bench.own_mesh import own_mesh
from loadgen.bench.stream import LoadFailed
from loadgen.loop import fast_loop

_BLOCK_TOKENS = 16
_SAVED_S = 60.0
_POLL_S = 0.05
_NOTE = (
    f"disk: {SHARED_TOKENS} shared + {NEW_TOKENS} new tokens, TTFT at the client after a restart, "
    "by turns with prompts that are new; files in the page cache"
)


def measure(plan: KvPlan) -> KvSection:
    """``disk_ttft_ratio``: known beginning ÷ cold, the median over pairs; and both in ms.

    Raises:
        LoadFailed: a request failed, or a known prompt was not saved or computed again.
        MeshNotStarted: there is no mesh to measure.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mesh-bench-kv-") as folder,
        asyncio.Runner(loop_factory=fast_loop()) as runner,
    ):
        return runner.run(_measure(plan, Path(folder)))


async def _measure(plan: KvPlan, folder: Path) -> KvSection:
    rng = random.Random(7)
    known = [random_tokens(rng, SHARED_TOKENS) for _ in range(plan.turns)]
    flags = ("--model", f"{SERVED}={plan.model}", "--both", "1", "--kv-disk", str(folder))
    async with own_mesh(flags) as mesh:
        for beginning in known:
            await ask(mesh, beginning + random_tokens(rng, NEW_TOKENS))
        await _until_saved(folder, plan.turns * ((SHARED_TOKENS + NEW_TOKENS) // _BLOCK_TOKENS))
    async with own_mesh(flags) as mesh:
        await ask(mesh, random_tokens(rng, NEW_TOKENS))  # the first request of a process is slower
        ttft = await by_turns(mesh, known, rng)
    return KvSection(figures={"disk_ttft_ratio": ttft["ratio"], "disk_ttft": ttft}, notes=(_NOTE,))


async def _until_saved(folder: Path, num_blocks: int) -> None:
    try:
        async with asyncio.timeout(_SAVED_S):
            while True:
                if await asyncio.to_thread(_num_saved, folder) >= num_blocks:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise LoadFailed(
            f"{_num_saved(folder)} of {num_blocks} blocks were saved within {_SAVED_S:.0f} s"
        ) from None


def _num_saved(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/*/*.kv"))
