"""Section ``remote`` of ``mesh bench kv``: a known beginning that another worker has.

One worker prefills, one decodes. Prompts are made known; then the prefill worker is replaced by one
that has nothing. What it needs of a known prompt lies with the decode worker, which keeps the KV of
what it decoded; new prompts take turns with known ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

from infra.bus import Bus, Msg
from infra.drain import Drainer
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
from loadgen.bench.stream import LoadFailed
from loadgen.loop import fast_loop
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat
from schemas.errors import SchemaError

_DRAIN_S = 30.0
_READY_S = 120.0  # a new process loads the model
_HANDED_OVER = {"MESH_CONTROL_ROUTE_SUFFIX_TOKENS": "0"}  # else decode workers do it themselves
_NOTES = (
    f"remote: {SHARED_TOKENS} shared + {NEW_TOKENS} new tokens, TTFT at the client, known to "
    "another worker of this host ÷ new, by turns; medians of pairs",
)


def measure(plan: KvPlan) -> KvSection:
    """``remote_prefix_ttft_ratio``.

    Raises:
        LoadFailed: a request failed, or a known prompt was computed again.
        MeshNotStarted: there is no mesh to measure.
    """
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        return runner.run(_measure(plan))


async def _measure(plan: KvPlan) -> KvSection:
    rng = random.Random(13)
    known = [random_tokens(rng, SHARED_TOKENS) for _ in range(plan.turns)]
    flags = ("--model", f"{SERVED}={plan.model}", "--prefill", "1", "--decode", "1")
    async with own_mesh(flags, _HANDED_OVER) as mesh:
        for beginning in known:
            await ask(mesh, beginning + random_tokens(rng, NEW_TOKENS))
        await _replace_prefill_worker(mesh)
        await ask(mesh, random_tokens(rng, SHARED_TOKENS))  # the first of a process is slower
        ttft = await by_turns(mesh, known, rng)
    return KvSection(
        figures={"remote_prefix_ttft_ratio": ttft["ratio"], "remote_prefix_ttft": ttft},
        notes=_NOTES,
    )


async def _replace_prefill_worker(mesh: OwnMesh) -> None:
    """Drain it, and wait until the one that is started in its place takes requests."""
    prefilling: dict[str, Beat] = {}
    heard = asyncio.Event()

    def hear(message: Msg) -> None:
        with contextlib.suppress(SchemaError):
            beat = decode(message.data, Beat)
            if beat.roles == ("prefill",):
                prefilling[beat.process] = beat
                heard.set()

    async with await Bus.connect(mesh.control_nats_url, role="control") as bus:
        await bus.subscribe(subjects.ALL_BEATS, hear)
        try:
            async with asyncio.timeout(_READY_S):
                await heard.wait()
                (old,) = prefilling
                drainer = Drainer(bus, lambda line: None)
                await drainer.drain(old, stay_down=False, timeout_s=_DRAIN_S)
                while not any(p != old and b.state == "ready" for p, b in prefilling.items()):
                    heard.clear()
                    await heard.wait()
        except TimeoutError:
            raise LoadFailed(f"no new prefill worker within {_READY_S:g} s") from None
