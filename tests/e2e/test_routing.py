"""Where requests go, in a mesh of real processes: to who holds their beginning, and near.

The simulated engine: a token that is lost, doubled or computed from a wrong block changes all that
follow, so equal answers say that placement changed nothing but the place.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pipeline.client import MeshClient
from schemas.requests import InferenceRequest
from tests.e2e.harness import Answer, Mesh, ask, mesh_of
from tests.e2e.observer import Observer
from tests.e2e.test_kv_index import num_indexed, until_indexed
from tests.e2e.test_takeover import bring_back, read_rest, read_some, strike

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

ZONES = {"prefill-0": "north", "prefill-1": "south", "decode-0": "north", "decode-1": "south"}
CHAT = {"temperature": 0.0, "seed": 7, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Mesh]:
    """Two workers of each role, one in each zone."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        running.simulated_flags = (str(tiny_folder), "--engine", "simulated")
        model = f"{running.model}={tiny_folder}"
        await running.start(
            "control", "control", "--model", model, "--route-temperature", "0",
        )  # fmt: skip
        for name in ZONES:
            await start(running, name)
        await running.until_ready()
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


async def start(mesh: Mesh, name: str) -> None:
    await mesh.start_worker(name, name.partition("-")[0], *mesh.simulated_flags, *flags(name))


def flags(name: str) -> tuple[str, ...]:
    """Prefill takes its time, so that two that come together find each other."""
    return ("--speed", "1" if name.startswith("prefill") else "20", "--zone", ZONES[name])


async def journeys(
    mesh: Mesh, client: MeshClient, *requests: InferenceRequest
) -> tuple[list[list[str]], list[Answer]]:
    """Requests that are asked together: who claimed each, one after the other, and the answers."""
    async with Observer.on(mesh.bus) as seen, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(client, request)) for request in requests]
    claims = seen.of("claim/1")
    names = [
        [
            mesh.name_of_worker(str(c.fields["worker"]))
            for c in claims
            if c.request_id == one.request_id
        ]
        for one in requests
    ]
    return names, [one.result() for one in asked]


async def until_known(mesh: Mesh, num_blocks: int) -> None:
    """The index has grown to so many blocks."""
    async with httpx.AsyncClient() as http:
        await until_indexed(mesh, http, num_blocks)


async def num_known(mesh: Mesh) -> int:
    async with httpx.AsyncClient() as http:
        return await num_indexed(mesh, http)


def prompt(first: int, length: int = 320) -> tuple[int, ...]:
    """Token ids that no other ``first`` begins with."""
    return (first, *(10 + (number * first) % 50 for number in range(length - 1)))


async def test_shared_prefixes_go_to_who_holds_them(mesh: Mesh, client: MeshClient) -> None:
    """Two prompts that come together go to two workers; what begins like one of them, and goes on
    for long, goes where that was computed, whichever comes first."""
    before = await num_known(mesh)
    firsts = [mesh.request(prompt(n), max_tokens=1, **CHAT) for n in (61, 67)]
    names, _ = await journeys(mesh, client, *firsts)
    assert {one[0] for one in names} == {"prefill-0", "prefill-1"}
    await until_known(mesh, before + 2 * 20)
    for number in (1, 0):
        rest = prompt(71 + number, 300)
        again = mesh.request((*prompt((61, 67)[number])[:192], *rest), max_tokens=1, **CHAT)
        claimed, (answer,) = await journeys(mesh, client, again)
        assert claimed == [names[number]]
        assert answer.usage.cached_tokens == 192
    await mesh.until_idle()


async def test_labels_keep_transfers_near(mesh: Mesh, client: MeshClient) -> None:
    """Of two prompts that come together, one ends with its first token. The other's blocks stay in
    their zone, though both decode workers are idle."""
    busy = mesh.request(prompt(73, 400), max_tokens=1, **CHAT)
    other = mesh.request(prompt(79, 400), max_tokens=4, **CHAT)
    (_, (prefill, decode)), _ = await journeys(mesh, client, busy, other)
    assert ZONES[prefill] == ZONES[decode]
    await mesh.until_idle()


async def test_a_next_turn_stays_with_who_holds_the_conversation(
    mesh: Mesh, client: MeshClient
) -> None:
    """The decode worker has all of it but the new words: it computes them itself, in one epoch. The
    answer is what any other way would have given."""
    before = await num_known(mesh)
    first = mesh.request(prompt(83, 96), max_tokens=40, **CHAT)
    (claimed,), (answer,) = await journeys(mesh, client, first)
    assert [name.partition("-")[0] for name in claimed] == ["prefill", "decode"]
    await until_known(mesh, before + 8)
    words = (*prompt(83, 96), *answer.ids[0], 11, 12, 13)
    turn = mesh.request(words, max_tokens=8, **CHAT)
    (stayed,), (second,) = await journeys(mesh, client, turn)
    assert stayed == [claimed[1]]
    assert second.usage.cached_tokens == 128
    salted = mesh.request(words, max_tokens=8, cache_salt="elsewhere", **CHAT)
    (went,), (same,) = await journeys(mesh, client, salted)
    assert len(went) == 2
    assert same.ids == second.ids
    await mesh.until_idle()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_worker_that_prefilled_a_rest_is_lost(
    mesh: Mesh, client: MeshClient, blow: signal.Signals
) -> None:
    """Killed or frozen in mid-answer: another one goes on from the token that came last, and the
    client reads each once."""
    words = prompt(89 if blow == signal.SIGKILL else 97, 96)
    before = await num_known(mesh)
    first = mesh.request(words, max_tokens=2, **CHAT)
    (claimed,), _ = await journeys(mesh, client, first)
    await until_known(mesh, before + 6)
    salted = mesh.request((*words, 11), max_tokens=120, cache_salt="apart", **CHAT)
    undisturbed = await ask(client, salted)
    stream = await client.submit(mesh.request((*words, 11), max_tokens=120, **CHAT))
    deltas = await read_some(stream, 10)
    assert stream.view.epoch == 1
    victim = strike(mesh, stream, blow)
    assert victim == claimed[1]
    answer = await read_rest(stream, deltas)
    assert answer.ids == undisturbed.ids
    assert stream.view.epoch > 1
    await bring_back(mesh, victim, *mesh.simulated_flags, *flags(victim))
    await mesh.until_idle()
