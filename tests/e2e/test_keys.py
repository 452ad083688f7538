"""API keys with real processes: one control process, two bridges that share a data directory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from tests.e2e.harness import MESH, Mesh, mesh_of

BRIDGES = ("bridge-a", "bridge-b")
PATIENCE_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


def mesh_keys(*words: str) -> str:
    """``mesh keys …`` as typed."""
    return subprocess.run(
        [MESH, "keys", *words], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


@dataclass
class House:
    mesh: Mesh
    file: Path
    clients: tuple[httpx.AsyncClient, ...]

    def new(self, tenant: str, name: str, *limits: str) -> str:
        options = ("--tenant", tenant, "--name", name, "--file", str(self.file))
        return mesh_keys("new", *options, *limits)

    async def statuses(self, key: str) -> set[int]:
        """What both bridges say to a look at the models."""
        return {(await one.get("/v1/models", headers=bearer(key))).status_code
                for one in self.clients}  # fmt: skip

    async def until_statuses(self, key: str, wanted: int) -> None:
        await within(lambda: self.statuses(key), lambda found: found == {wanted})

    def log_lines(self, event: str) -> list[dict[str, str]]:
        logs = [self.mesh.roles[name].log.read_text() for name in BRIDGES]
        lines = [json.loads(line) for log in logs for line in log.splitlines() if line[:1] == "{"]
        return [line for line in lines if line.get("event") == event]


async def within(look: Callable[[], object], holds: Callable[..., bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = look()
            if holds(await found if asyncio.iscoroutine(found) else found):
                return
            await asyncio.sleep(0.05)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("mesh")
    file = folder / "keys.toml"
    file.write_text("# made by hand\n")
    async with mesh_of(folder) as mesh:
        await mesh.start("control", "control", "--model", f"{mesh.model}={tiny_folder}")
        for name in BRIDGES:
            await mesh.start("bridge", name, "--port", "0", "--api-keys", str(file))
        await mesh.until_ready()
        ports = [await mesh.bridge_port(name, PATIENCE_S) for name in BRIDGES]
        clients = tuple(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
            for port in ports
        )
        yield House(mesh, file, clients)
        for client in clients:
            await client.aclose()
        mesh.check_alive()


async def test_keys_come_and_go_without_a_restart(house: House) -> None:
    """A new one opens both bridges, a revoked one closes both; so does no file that is broken."""
    key = house.new("acme", "first")
    await house.until_statuses(key, 200)
    whole = house.file.read_text()
    house.file.write_text(whole + "\n[keys.second]\nrpm = 5\n")
    await within(
        lambda: house.log_lines("api_keys_refused"), lambda lines: len(lines) >= len(BRIDGES)
    )
    assert {line["field"] for line in house.log_lines("api_keys_refused")} == {"keys.second.rpm"}
    assert await house.statuses(key) == {200}
    house.file.write_text(whole)
    mesh_keys("revoke", str(house.file), "first")
    await house.until_statuses(key, 401)
    assert house.file.read_text().startswith("# made by hand\n")


async def test_two_bridges_share_one_budget(house: House) -> None:
    """A hundred requests through both at once: together no more than one bridge would let in."""
    key = house.new("acme", "shared", "--rpm", "20")
    await house.until_statuses(key, 200)
    begun_s = time.monotonic()
    body = {"model": house.mesh.model, "prompt": "x"}
    answers = await asyncio.gather(
        *(
            house.clients[i % 2].post("/tokenize", json=body, headers=bearer(key))
            for i in range(100)
        )
    )
    passed_s = time.monotonic() - begun_s
    statuses = [one.status_code for one in answers]
    assert set(statuses) <= {200, 429}
    assert 20 <= statuses.count(200) <= 20 * (1 + passed_s / 60)
    refused = next(one for one in answers if one.status_code == 429)
    assert refused.headers["x-ratelimit-limit-requests"] == "20"
    assert 0 < float(refused.headers["retry-after"]) <= 60


async def test_openais_errors(house: House) -> None:
    """Each limit of a key is the exception that programs know."""
    key = house.new("bob", "bob", "--models", "other", "--tpm", "50")
    open_key = house.new("bob", "bob-2", "--tpm", "50")
    await house.until_statuses(open_key, 200)
    base = str(house.clients[0].base_url) + "/v1"
    chat = [{"role": "user", "content": "Hi"}]
    for secret, kind in (
        ("mesh-unknown", openai.AuthenticationError),
        (key, openai.NotFoundError),
        (open_key, openai.RateLimitError),
    ):
        async with openai.AsyncOpenAI(base_url=base, api_key=secret, max_retries=0) as client:
            with pytest.raises(kind):
                await client.chat.completions.create(
                    model=house.mesh.model, messages=chat, max_tokens=100
                )
