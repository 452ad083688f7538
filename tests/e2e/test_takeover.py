"""A worker is killed or frozen in mid-request; the client reads the undisturbed answer.

The simulated engine: its next token is a hash of all before it, read out of the KV pool, so a
token that is lost, doubled or computed from a wrong block changes all that follow.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from pipeline.token_stream import TokenStream
from schemas.tokens import TokenDelta
from tests.e2e.harness import Answer, Mesh, ask

NUM_TOKENS = 60


async def read_some(stream: TokenStream, count: int) -> list[TokenDelta]:
    """At least ``count`` deltas."""
    deltas: list[TokenDelta] = []
    while len(deltas) < count:
        deltas += await stream.next_deltas()
    return deltas


async def read_rest(stream: TokenStream, deltas: list[TokenDelta]) -> Answer:
    async for delta in stream:
        deltas.append(delta)
    assert [delta.number for delta in deltas] == list(range(len(deltas)))
    assert stream.end is not None
    assert stream.end.usage.completion_tokens == len(deltas)
    ids = tuple(token for delta in deltas for token in delta.ids)
    text = "".join(delta.text for delta in deltas)
    return Answer((ids,), (text,), tuple(deltas), stream.end.usage)


async def wake(mesh: Mesh, name: str) -> None:
    """Let a frozen worker go on; it must come back under another id, ready."""
    old = mesh.beat_of(name).worker
    mesh.roles[name].send(signal.SIGCONT)
    async with asyncio.timeout(10):
        while mesh.beat_of(name).worker == old:
            await asyncio.sleep(0.02)
    await mesh.until_ready(name)


@pytest.fixture
def slow_prompt() -> str:
    """Its prefill takes a while at the speed these tests run at."""
    return "word " * 120


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_decode_worker_lost_in_mid_stream(
    simulated_mesh: Mesh, blow: signal.Signals, temperature: float
) -> None:
    """Killed or frozen for good in mid-answer: another one goes on from the token that came last.

    A frozen one that wakes later publishes into the void and comes back under another id.
    """
    mesh = simulated_mesh
    await mesh.start_worker("decode-1", "decode", *mesh.simulated_flags)
    await mesh.until_ready("decode-1")
    sampling = {"max_tokens": NUM_TOKENS, "temperature": temperature, "seed": 7, "ignore_eos": True}
    async with mesh.client() as client, asyncio.timeout(40):
        undisturbed = await ask(client, mesh.request("The sea is", **sampling))
        stream = await client.submit(mesh.request("The sea is", **sampling))
        deltas = await read_some(stream, 10)
        assert stream.view.claim is not None
        victim = mesh.name_of_worker(stream.view.claim.worker)
        assert victim.startswith("decode")
        mesh.roles[victim].send(blow)
        answer = await read_rest(stream, deltas)
    assert answer.ids == undisturbed.ids
    assert answer.texts == undisturbed.texts
    assert stream.view.epoch > 2
    if blow == signal.SIGSTOP:
        await wake(mesh, victim)
    await mesh.until_idle()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_prefill_worker_lost_in_mid_prefill(
    simulated_mesh: Mesh, blow: signal.Signals, slow_prompt: str
) -> None:
    """Killed or frozen before token 0: the request is prefilled by another."""
    mesh = simulated_mesh
    await mesh.start_worker("prefill-1", "prefill", *mesh.simulated_flags)
    await mesh.until_ready("prefill-1")
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    async with mesh.client() as client, asyncio.timeout(40):
        undisturbed = await ask(client, mesh.request(slow_prompt, **sampling))
        stream = await client.submit(mesh.request(slow_prompt, cache_salt="x", **sampling))
        while stream.view.claim is None:
            await asyncio.sleep(0.001)
        victim = mesh.name_of_worker(stream.view.claim.worker)
        assert victim.startswith("prefill")
        mesh.roles[victim].send(blow)
        answer = await read_rest(stream, [])
    assert answer.ids == undisturbed.ids
    assert stream.view.epoch == 3
    if blow == signal.SIGSTOP:
        await wake(mesh, victim)
    await mesh.until_idle()


async def test_requests_wait_while_no_worker_is_up(simulated_mesh: Mesh) -> None:
    """All workers are gone: what is submitted waits, and starts when one comes."""
    mesh = simulated_mesh
    async with mesh.client() as client, asyncio.timeout(40):
        expected = await ask(
            client, mesh.request("The sea is", max_tokens=5, ignore_eos=True, seed=1)
        )
        for name in ("prefill-0", "decode-0"):
            mesh.roles[name].kill()
        stream = await client.submit(
            mesh.request("The sea is", max_tokens=5, ignore_eos=True, seed=1)
        )
        accepted = await stream.accepted()
        assert accepted.prompt_tokens > 0
        await mesh.start_worker("both-0", "both", *mesh.simulated_flags)
        answer = await read_rest(stream, [])
    assert answer.ids == expected.ids
    await mesh.until_idle()
