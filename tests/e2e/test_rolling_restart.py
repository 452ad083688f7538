"""Every role is restarted in turn while clients read: nobody notices."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from infra.drain import Drainer
from infra.task_scope import task_scope
from pipeline.client import MeshClient
from tests.e2e.conftest import start_simulated
from tests.e2e.harness import Answer, Mesh, ask, mesh_of

PROMPTS = tuple(f"The sea is number {number}" for number in range(6))
NUM_TOKENS = 40
SAMPLING = {"max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True}


@dataclass(slots=True)
class Load:
    """Clients that ask without a pause and check every answer."""

    mesh: Mesh
    client: MeshClient
    expected: dict[str, Answer]
    num_answers: int = 0
    is_over: bool = False
    notes: list[str] = field(default_factory=list)

    async def over_bus(self, prompt: str) -> None:
        while not self.is_over:
            answer = await ask(self.client, self.mesh.request(prompt, **SAMPLING))
            assert answer.ids == self.expected[prompt].ids
            assert answer.usage.completion_tokens == NUM_TOKENS
            self.num_answers += 1

    async def until_more(self, count: int) -> None:
        """Wait until so many more answers are complete."""
        wanted = self.num_answers + count
        while self.num_answers < wanted:
            await asyncio.sleep(0.01)

    async def over_http(self, port: int, prompt: str) -> None:
        """Streams through a bridge; while it is away a connection is refused, or a request is
        told so, before any byte of an answer. What has begun ends with ``[DONE]``."""
        body = {"model": self.mesh.model, "prompt": prompt, "stream": True, **SAMPLING}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            while not self.is_over:
                lines: list[str] = []
                try:
                    async with http.stream("POST", "/v1/completions", json=body) as answer:
                        if answer.status_code == 503:
                            self.notes.append("refused")
                            await asyncio.sleep(0.05)
                            continue
                        async for line in answer.aiter_lines():
                            lines += [line] if line else []
                except httpx.TransportError:
                    assert not lines, "an answer was cut"
                    self.notes.append("away")
                    await asyncio.sleep(0.05)
                    continue
                assert lines[-1] == "data: [DONE]", lines[-1]
                pieces = [json.loads(line[6:])["choices"] for line in lines[:-1] if "data" in line]
                text = "".join(choices[0]["text"] for choices in pieces if choices)
                assert text == self.expected[prompt].texts[0]
                self.notes.append("answered")


async def expected_answers(mesh: Mesh, client: MeshClient) -> dict[str, Answer]:
    return {prompt: await ask(client, mesh.request(prompt, **SAMPLING)) for prompt in PROMPTS}


async def leave(mesh: Mesh, name: str) -> None:
    """SIGTERM, and an orderly end."""
    process = mesh.roles[name].process
    mesh.roles[name].send(signal.SIGTERM)
    async with asyncio.timeout(60):
        while process.poll() is None:
            await asyncio.sleep(0.02)
    assert process.returncode == 0, mesh.roles[name].log.read_text()[-3000:]


def events(mesh: Mesh, name: str, event: str) -> list[dict[str, object]]:
    lines = mesh.roles[name].log.read_text().splitlines()
    return [line for text in lines if (line := json.loads(text))["event"] == event]


@pytest.mark.slow
async def test_each_role_is_restarted_under_load(tmp_path: Path, tiny_folder: Path) -> None:
    """Workers one after the other, control, bridge: no request fails, every token is right, and
    control has seen nobody die."""
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240):
        await start_simulated(mesh, tiny_folder, prefill=2, decode=2)
        await mesh.start("bridge", "bridge", "--port", "0")
        await mesh.until_ready("bridge")
        port = await mesh.bridge_port("bridge")
        async with mesh.client() as client, task_scope() as tasks:
            load = Load(mesh, client, await expected_answers(mesh, client))
            clients = [tasks.create_task(load.over_bus(prompt)) for prompt in PROMPTS]
            clients.append(tasks.create_task(load.over_http(port, PROMPTS[0])))
            for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
                await load.until_more(6)
                await leave(mesh, name)
                role = name.partition("-")[0]
                await mesh.start_worker(name, role, *mesh.simulated_flags)
                await mesh.until_ready(name)
            await load.until_more(6)
            await leave(mesh, "bridge")
            await mesh.start("bridge", "bridge", "--port", str(port))
            await mesh.until_ready("bridge")
            await load.until_more(6)
            await leave(mesh, "control")
            folder = mesh.simulated_flags[0]
            await mesh.start("control", "control", "--model", f"{mesh.model}={folder}")
            await mesh.until_ready("control")
            await load.until_more(12)
            load.is_over = True
            for one in clients:
                await one
        assert load.notes.count("answered") > 2
        await mesh.until_idle()
        assert events(mesh, "control", "worker_dead") == []
        assert len(events(mesh, "control", "worker_left")) == 4


async def test_a_worker_drained_by_order_keeps_what_it_offered(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """`mesh drain` of a prefill worker whose blocks nobody has read yet: it stays until they are,
    and the answer is that of an undisturbed run."""
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240):
        await start_simulated(mesh, tiny_folder, prefill=0)
        patient = (*mesh.simulated_flags, "--grace-s", "40")
        await mesh.start_worker("prefill-0", "prefill", *patient)
        await mesh.until_ready("prefill-0")
        async with mesh.client() as client:
            request = mesh.request(PROMPTS[0], **SAMPLING)
            expected = await ask(client, mesh.request(PROMPTS[0], **SAMPLING))
            mesh.roles["decode-0"].kill()
            stream = await client.submit(request)
            first = await stream.next_deltas()
            lines: list[str] = []
            async with task_scope() as tasks:
                drain = Drainer(mesh.bus, lines.append)
                draining = tasks.create_task(
                    drain.drain("prefill-0", stay_down=False, timeout_s=40)
                )
                while mesh.state("prefill-0") != "draining":
                    await asyncio.sleep(0.01)
                await mesh.start_worker("decode-1", "decode", *mesh.simulated_flags)
                deltas = [*first]
                async for delta in stream:
                    deltas.append(delta)
                await draining
            assert tuple(token for delta in deltas for token in delta.ids) == expected.ids[0]
            assert stream.view.epoch == 2, "nobody had to compute the prompt again"
            assert mesh.roles["prefill-0"].process.wait(5) == 0
        await mesh.until_idle()
