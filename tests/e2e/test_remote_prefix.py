"""Conversations whose next turn is prefilled by another process: what one worker has, all have."""

from __future__ import annotations

import asyncio
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
OTHER = tuple(range(150, 240))
# Prefill so slow that half of what a turn takes is seconds: whatever else the machine does, there
# is time to ask for a prefix and to read it.
SPEEDS = {"prefill": "0.005", "decode": "20"}


def flags(role: str) -> tuple[str, ...]:
    return ("--engine", "simulated", "--speed", SPEEDS[role], "--block-size", str(BLOCK_SIZE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Mesh]:
    """Control, a prefill worker and two decode workers."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        model = f"{running.model}={tiny_folder}"
        await running.start(  # decode workers would compute short turns themselves
            "control", "control", "--model", model, "--route-suffix-tokens", "0"
        )
        for name in ("prefill-0", "decode-0", "decode-1"):
            role = name.partition("-")[0]
            await running.start_worker(name, role, tiny_folder, *flags(role))
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
    """The same prompt again is found, under another salt it is not; the answers are the same."""
    prompt = PROMPT[::-1]
    first = await turn(mesh, client, prompt, salt="a", count=2)
    found = [await turn(mesh, client, prompt, salt=salt, count=2) for salt in ("a", "b")]
    assert [answer.usage.cached_tokens for answer in (first, *found)] == [0, 88, 0]
    assert {answer.ids for answer in (first, *found)} == {first.ids}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first_turns(mesh: Mesh, client: MeshClient, tiny_folder: Path) -> tuple[Answer, Answer]:
    """Two conversations begin; then the prefill worker is killed. The one that comes in its place
    has nothing, and knows how slowly it computes."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(turn(mesh, client, prompt)) for prompt in (PROMPT, OTHER)]
    mesh.roles["prefill-0"].kill()
    await mesh.start_worker("prefill-1", "prefill", tiny_folder, *flags("prefill"))
    await mesh.until_ready("prefill-1")
    await turn(mesh, client, PROMPT[7:47], salt="other", count=1)
    return asked[0].result(), asked[1].result()


async def test_the_next_turn_is_found_although_its_prefill_worker_is_new(
    mesh: Mesh, client: MeshClient, first_turns: tuple[Answer, Answer]
) -> None:
    """Turn 1's prompt and answer lie with the decode worker: the new prefill worker fetches all
    full blocks of both, and the answer is as computed."""
    first, _ = first_turns
    second = (*PROMPT, *first.ids[0], 20, 21, 22)
    answer = await turn(mesh, client, second, count=2)
    num_kept = len(PROMPT) + len(first.ids[0]) - 1  # the last token's KV was never computed
    assert answer.usage.cached_tokens == num_kept // BLOCK_SIZE * BLOCK_SIZE
    computed = await turn(mesh, client, second, salt="not cached", count=2)
    assert computed.usage.cached_tokens == 0
    assert computed.ids == answer.ids


async def test_owners_that_are_frozen_cost_a_wait_and_no_answer(
    mesh: Mesh, client: MeshClient, first_turns: tuple[Answer, Answer]
) -> None:
    """Whoever has the prompt stands still when it is asked for again: it is computed."""
    _, before = first_turns
    owners = [mesh.roles["decode-0"], mesh.roles["decode-1"]]
    for owner in owners:
        owner.send(signal.SIGSTOP)
    try:
        alone = await turn(mesh, client, OTHER, count=1)  # ends with its prefill
    finally:
        for owner in owners:
            owner.send(signal.SIGCONT)
    assert alone.ids[0] == before.ids[0][:1]
    await mesh.until_idle()
