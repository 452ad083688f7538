"""A worker is killed or frozen in mid-request; the client reads the undisturbed answer.

The simulated engine: its next token is a hash of all before it, read out of the KV pool, so a
token that is lost, doubled or computed from a wrong block changes all that follow.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.client import MeshClient
from pipeline.token_stream import TokenStream
from schemas.tokens import TokenDelta
from tests.e2e.conftest import start_simulated
from tests.e2e.harness import Answer, Mesh, ask, mesh_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def read_some(stream: TokenStream, count: int) -> list[TokenDelta]:
    """At least ``count`` tokens, a delta each."""
    deltas: list[TokenDelta] = []
    while len(deltas) < count:
        deltas += [one for delta in await stream.next_deltas() for one in delta.split()]
    return deltas


async def read_rest(stream: TokenStream, deltas: list[TokenDelta]) -> Answer:
    async for delta in stream:
        deltas += delta.split()
    assert [delta.number for delta in deltas] == list(range(len(deltas)))
    assert stream.end is not None
    assert stream.end.usage.completion_tokens == len(deltas)
    ids = tuple(token for delta in deltas for token in delta.ids)
    text = "".join(delta.text for delta in deltas)
    return Answer((ids,), (text,), tuple(deltas), stream.end.usage)


async def bring_back(mesh: Mesh, name: str, *start_flags: str) -> None:
    """Wake a frozen worker, which must come back under another id, or start a killed one anew."""
    role = mesh.roles[name]
    if role.process.poll() is not None:
        await mesh.start_worker(name, name.partition("-")[0], *start_flags)
    else:
        old = mesh.beat_of(name).worker
        role.send(signal.SIGCONT)
        async with asyncio.timeout(60):
            while mesh.beat_of(name).worker == old:
                await asyncio.sleep(0.02)
    await mesh.until_ready(name)


def strike(mesh: Mesh, stream: TokenStream, blow: signal.Signals) -> str:
    """Kill or freeze whoever holds the request now; its name."""
    assert stream.view.claim is not None
    victim = mesh.name_of_worker(stream.view.claim.worker)
    mesh.roles[victim].send(blow)
    if blow == signal.SIGKILL:
        mesh.roles[victim].process.wait(5)
    return victim


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Mesh]:
    """Two workers of each role."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        await start_simulated(running, tiny_folder, prefill=2, decode=2)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_decode_worker_lost_in_mid_stream(
    mesh: Mesh, client: MeshClient, blow: signal.Signals, temperature: float
) -> None:
    """Killed or frozen for good in mid-answer: another one goes on from the token that came last.

    A frozen one that wakes later publishes into the void and comes back under another id.
    """
    sampling = {"max_tokens": 60, "temperature": temperature, "seed": 7, "ignore_eos": True}
    undisturbed = await ask(client, mesh.request("The sea is", **sampling))
    stream = await client.submit(mesh.request("The sea is", **sampling))
    deltas = await read_some(stream, 10)
    victim = strike(mesh, stream, blow)
    assert victim.startswith("decode")
    answer = await read_rest(stream, deltas)
    assert answer.ids == undisturbed.ids
    assert answer.texts == undisturbed.texts
    assert stream.view.epoch > 2
    await bring_back(mesh, victim, *mesh.simulated_flags)
    await mesh.until_idle()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_prefill_worker_lost_in_mid_prefill(
    mesh: Mesh, client: MeshClient, blow: signal.Signals
) -> None:
    """Killed or frozen before token 0: the request is prefilled by another."""
    prompt = "word " * 120  # takes a while at the speed these workers run at
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    undisturbed = await ask(client, mesh.request(prompt, **sampling))
    stream = await client.submit(mesh.request(prompt, cache_salt=blow.name, **sampling))
    while stream.view.claim is None:
        await asyncio.sleep(0.001)
    victim = strike(mesh, stream, blow)
    assert victim.startswith("prefill")
    answer = await read_rest(stream, [])
    assert answer.ids == undisturbed.ids
    assert stream.view.epoch == 3
    await bring_back(mesh, victim, *mesh.simulated_flags)
    await mesh.until_idle()


async def test_requests_wait_while_no_worker_is_up(mesh: Mesh, client: MeshClient) -> None:
    """All workers are gone: what is submitted waits, and starts when one comes."""
    sampling = {"max_tokens": 5, "ignore_eos": True, "seed": 1}
    expected = await ask(client, mesh.request("The sea is", **sampling))
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        mesh.roles[name].kill()
    stream = await client.submit(mesh.request("The sea is", **sampling))
    accepted = await stream.accepted()
    assert accepted.prompt_tokens > 0
    await mesh.start_worker("both-0", "both", *mesh.simulated_flags)
    answer = await read_rest(stream, [])
    assert answer.ids == expected.ids
    await mesh.until_idle()
