"""The broker dies, or one of three: streams go on, queued requests stay, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from infra.bus import TOKENS, EmbeddedBroker, waiting_work
from infra.task_scope import task_scope
from pipeline.client import MeshClient
from pipeline.token_stream import TokenStream
from schemas.errors import BusUnavailable
from tests.e2e.cluster import Cluster, cluster_in
from tests.e2e.harness import Answer, Mesh, ask, mesh_of, mesh_on
from tests.e2e.test_takeover import read_rest, read_some

PROMPTS = tuple(f"The sea is number {number}" for number in range(6))
NUM_TOKENS = 150
SAMPLING = {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 5, "ignore_eos": True}
LATE = "late"  # a model without a worker, until the end


async def start(mesh: Mesh, folder: Path, *flags: str) -> None:
    """Two models, one with workers at a speed at which an answer takes a second or two."""
    models = [f"--model={name}={folder}" for name in (mesh.model, LATE)]
    mesh.simulated_flags = (str(folder), "--engine", "simulated", "--speed", "2")
    await mesh.start("control", "control", *models, *flags)
    for role in ("prefill", "decode"):
        await mesh.start_worker(f"{role}-0", role, *mesh.simulated_flags)
    await mesh.until_ready()


@asynccontextmanager
async def under_way(
    mesh: Mesh, client: MeshClient
) -> AsyncIterator[tuple[dict[str, Answer], dict[str, asyncio.Task[Answer]], list[TokenStream]]]:
    """What undisturbed answers are, the same ones in mid-stream, and requests that wait."""
    expected = {prompt: await ask(client, mesh.request(prompt, **SAMPLING)) for prompt in PROMPTS}
    queued = [
        await client.submit(mesh.request(prompt, model=LATE, **SAMPLING)) for prompt in PROMPTS
    ]
    for stream in queued:
        await stream.accepted()
    async with task_scope() as tasks:
        begun = {}
        for prompt in PROMPTS:
            stream = await client.submit(mesh.request(prompt, **SAMPLING))
            begun[prompt] = (stream, await read_some(stream, 3))
        reading = {
            prompt: tasks.create_task(read_rest(stream, deltas))
            for prompt, (stream, deltas) in begun.items()
        }
        yield expected, reading, queued


async def check(
    mesh: Mesh,
    expected: dict[str, Answer],
    reading: dict[str, asyncio.Task[Answer]],
    queued: list[TokenStream],
) -> None:
    """Every answer is the undisturbed one; those that waited are answered by a worker that comes
    now."""
    for prompt, task in reading.items():
        assert (await task).ids == expected[prompt].ids
    waiting = await waiting_now(mesh)
    assert sum(n for subject, n in waiting.items() if f".{LATE}@" in subject) == len(queued)
    mesh.model = LATE
    await mesh.start_worker("late-0", "both", *mesh.simulated_flags)
    await mesh.until_ready("late-0")
    for prompt, stream in zip(PROMPTS, queued, strict=True):
        assert (await read_rest(stream, [])).ids == expected[prompt].ids
    await mesh.until_idle()


async def waiting_now(mesh: Mesh) -> dict[str, int]:
    """A cluster that lost a server answers late."""
    while True:
        try:
            return await waiting_work(mesh.bus)
        except BusUnavailable:
            await asyncio.sleep(0.1)


async def test_a_broker_that_is_killed_and_started_again(tmp_path: Path, tiny_folder: Path) -> None:
    """One node, SIGKILL, the same store and port: running streams complete exactly, what waited
    still waits."""
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240):
        broker = mesh.broker
        assert isinstance(broker, EmbeddedBroker)
        await start(mesh, tiny_folder)
        async with mesh.client() as client:
            async with under_way(mesh, client) as (expected, reading, queued):
                await broker.kill()
                await asyncio.sleep(0.5)  # the outage itself, not a wait for a condition
                await broker.restart()
                await check(mesh, expected, reading, queued)
            mesh.check_alive()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_one_of_three_nodes_is_lost(tmp_path: Path, tiny_folder: Path, victim: str) -> None:
    """Three replicas, SIGKILL of the node that leads the token stream, or of one that does not:
    streams go on, nothing is lost. Afterwards it comes back and catches up."""
    async with cluster_in(tmp_path / "cluster") as cluster, asyncio.timeout(240):
        async with mesh_on(cluster, tmp_path) as mesh:
            await start(mesh, tiny_folder, "--replicas", "3")
            await cluster.until_replicated(mesh.bus)
            async with mesh.client() as client:
                async with under_way(mesh, client) as (expected, reading, queued):
                    node = cluster.node(await choose(cluster, mesh, victim))
                    await node.kill()
                    await check(mesh, expected, reading, queued)
                    await node.restart()
                    await cluster.until_replicated(mesh.bus)
                mesh.check_alive()


async def choose(cluster: Cluster, mesh: Mesh, victim: str) -> str:
    leader = await cluster.leader_of(mesh.bus, TOKENS)
    assert leader
    if victim == "leader":
        return leader
    return next(node.name for node in cluster.nodes if node.name != leader)
