"""A request is cancelled, or its deadline passes, at each stage: compute stops, nothing is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from infra.bus import waiting_work
from pipeline.client import MeshClient
from pipeline.token_stream import TokenStream
from schemas.errors import DeadlineExceeded, RequestCancelled
from schemas.tokens import Claim
from tests.e2e.harness import Mesh, Role, ask, mesh_of
from tests.e2e.test_takeover import read_rest, read_some

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEED = "0.4"  # a step takes 50 ms and more: an answer of 400 tokens 20 s
SLOW = "0.05"  # and the eight chunks of a long prompt half a second each
DEADLINE_S = 3.0
LONG_PROMPT = tuple(5 + number % 200 for number in range(480))
SHORT_PROMPT = (5, 6, 7, 8)
WORKERS = {"queued": (), "prefilling": ("prefill",), "kv-ready": ("prefill",),
           "decoding": ("prefill", "decode")}  # fmt: skip


def simulated(speed: str) -> tuple[str, ...]:
    """Flags of a worker."""
    batch = ("--max-batch-tokens", "64", "--max-num-sequences", "16")
    return ("--engine", "simulated", "--speed", speed, *batch)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Mesh]:
    """A control process; each stage has the workers that lead a request to it and no further."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        models = [f"--model={stage}={tiny_folder}" for stage in WORKERS]
        await running.start("control", "control", *models)
        for stage, roles in WORKERS.items():
            for role in roles:
                running.model = stage
                flags = simulated(SLOW if stage == "prefilling" else SPEED)
                await running.start_worker(f"{stage}-{role}", role, tiny_folder, *flags)
        await running.until_ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


async def reach(stage: str, mesh: Mesh, stream: TokenStream) -> None:
    """Wait until the request is in the middle of ``stage``."""
    await stream.accepted()
    if stage == "queued":
        assert await is_queued(mesh)
    elif stage == "prefilling":
        while not (isinstance(stream.view.claim, Claim) and mesh_busy(mesh, stage)):
            await asyncio.sleep(0.005)
    else:
        await read_some(stream, 1 if stage == "kv-ready" else 3)
        while not mesh_busy(mesh, stage):
            await asyncio.sleep(0.005)


async def is_queued(mesh: Mesh) -> bool:
    return any(".prefill.queued@" in subject for subject in await waiting_work(mesh.bus))


def mesh_busy(mesh: Mesh, stage: str) -> bool:
    """Whether a worker of ``stage`` says that it holds blocks."""
    beats = [mesh.beat_of(name) for name in mesh.roles if name.startswith(stage)]
    return any(beat.load.num_free_blocks < beat.load.num_blocks for beat in beats)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("stage", WORKERS)
async def test_an_end_at_any_stage_frees_everything(
    mesh: Mesh, client: MeshClient, stage: str, how: str
) -> None:
    """The client gets the error that says why. Within a lease period no worker computes for it or
    holds a block, and the next request is served as if nothing had been."""
    prompt = LONG_PROMPT if stage == "prefilling" else SHORT_PROMPT
    num_tokens = 30 if stage == "prefilling" else 400
    request = mesh.request(prompt, model=stage, max_tokens=num_tokens, ignore_eos=True, seed=1)
    if how == "deadline":
        ends = mesh.bus.now_unix_ms() + int(DEADLINE_S * 1000)
        request = msgspec.structs.replace(request, deadline_unix_ms=ends)
    async with asyncio.timeout(60):
        stream = await client.submit(request)
        await reach(stage, mesh, stream)
        if how == "cancel":
            await stream.cancel("enough")
        with pytest.raises(RequestCancelled if how == "cancel" else DeadlineExceeded):
            await read_rest(stream, [])
        await mesh.until_idle(mesh.bus.times.lease_s)
    if stage == "decoding":
        assert len((await ask(client, mesh.request(prompt, model=stage, max_tokens=3))).ids[0]) <= 3


async def test_what_ended_in_the_queue_is_never_computed(
    mesh: Mesh, client: MeshClient, tiny_folder: Path
) -> None:
    """Requests that were cancelled or expired while they waited are dropped by the worker that
    comes; the one that still waits is answered."""
    gone = await client.submit(mesh.request(SHORT_PROMPT, model="queued", max_tokens=4))
    kept = await client.submit(mesh.request(SHORT_PROMPT, model="queued", max_tokens=4, seed=2))
    await kept.accepted()
    await gone.accepted()
    await gone.cancel("enough")
    mesh.model = "queued"
    role = await mesh.start_worker("late", "both", tiny_folder, *simulated(SPEED))
    async with asyncio.timeout(240):
        await mesh.until_ready("late")
        answer = await read_rest(kept, [])
        while await is_queued(mesh) or not executed_by(role):
            await asyncio.sleep(0.01)
    assert len(answer.ids[0]) <= 4
    assert len(executed_by(role)) == 1


def executed_by(role: Role) -> list[str]:
    return [line for line in role.log.read_text().splitlines() if "request_executed" in line]
