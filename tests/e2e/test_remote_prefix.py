"""Conversations whose next turn is prefilled by another process: what one worker has, all have."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pipeline.client import MeshClient
from tests.e2e.harness import Answer, Mesh, ask, mesh_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

BLOCK_SIZE = 4
PROMPT = tuple(range(20, 110))
# A model so slow that a turn takes over a second to compute: whatever else the machine does, there
# is time to ask for it and to read it.
FLAGS = ("--engine", "simulated", "--speed", "0.02", "--block-size", str(BLOCK_SIZE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Mesh]:
    """Control, a prefill worker and two decode workers."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        await running.start("control", "control", "--model", f"{running.model}={tiny_folder}")
        for name in ("prefill-0", "decode-0", "decode-1"):
            await running.start_worker(name, name.partition("-")[0], tiny_folder, *FLAGS)
        await running.until_ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


async def turn(
    mesh: Mesh, client: MeshClient, prompt: tuple[int, ...], *, salt: str = "", count: int = 5
) -> Answer:
    request = mesh.request(
        prompt, cache_salt=salt, max_tokens=count, temperature=0.0, seed=1, ignore_eos=True
    )
    return await ask(client, request, timeout_s=120)


async def test_another_salt_shares_nothing(mesh: Mesh, client: MeshClient) -> None:
    """The same prompt again is found, under another salt it is not, and each salt finds its own;
    the answers are the same."""
    prompt = PROMPT[::-1]
    first = await turn(mesh, client, prompt, salt="a", count=2)
    found = [await turn(mesh, client, prompt, salt=salt, count=2) for salt in ("a", "b", "b")]
    assert [answer.usage.cached_tokens for answer in (first, *found)] == [0, 88, 0, 88]
    assert {answer.ids for answer in (first, *found)} == {first.ids}


async def test_the_next_turn_is_found_although_its_prefill_worker_is_new(
    mesh: Mesh, client: MeshClient, tiny_folder: Path
) -> None:
    """Turn 1's prompt and answer lie with the decode worker. The prefill worker is killed; the one
    that comes in its place fetches all full blocks of both, and the answer is as computed."""
    first = await turn(mesh, client, PROMPT)
    mesh.roles["prefill-0"].kill()
    await mesh.start_worker("prefill-1", "prefill", tiny_folder, *FLAGS)
    await mesh.until_ready("prefill-1")
    await turn(mesh, client, PROMPT[7:], salt="other", count=1)  # it learns how fast it computes
    second = (*PROMPT, *first.ids[0], 20, 21, 22)
    answer = await turn(mesh, client, second, count=2)
    num_kept = len(PROMPT) + len(first.ids[0]) - 1  # the last token's KV was never computed
    assert answer.usage.cached_tokens == num_kept // BLOCK_SIZE * BLOCK_SIZE
    computed = await turn(mesh, client, second, salt="not cached", count=2)
    assert computed.usage.cached_tokens == 0
    assert computed.ids == answer.ids


async def test_an_owner_that_is_frozen_costs_a_wait_and_no_answer(
    mesh: Mesh, client: MeshClient, tiny_folder: Path
) -> None:
    """Both decode workers have a prompt; the prefill worker is new. One is killed and one frozen
    while the prompt is asked for again: it is computed, and decoded when the frozen one wakes."""
    prompt = tuple(reversed(PROMPT[:80]))
    before = await turn(mesh, client, prompt)
    mesh.roles["prefill-1"].kill()
    await mesh.start_worker("prefill-2", "prefill", tiny_folder, *FLAGS)
    await mesh.until_ready("prefill-2")
    await turn(mesh, client, PROMPT[9:], salt="other", count=1)
    owners = [mesh.roles["decode-0"], mesh.roles["decode-1"]]
    for owner in owners:
        owner.send(signal.SIGSTOP)
    try:
        alone = await turn(mesh, client, prompt, count=1)  # ends with its prefill
    finally:
        for owner in owners:
            owner.send(signal.SIGCONT)
    assert alone.ids[0] == before.ids[0][:1]
    await mesh.until_idle()
