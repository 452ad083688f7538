"""Requests wait while no worker is up, up to a limit; beyond it clients are told when to return."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from infra.task_scope import task_scope
from tests.e2e.harness import ask, mesh_of

LIMIT = 4


async def test_beyond_the_limit_is_429_and_what_waits_is_answered(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """The limit is per model; what was accepted is answered when a worker comes, and then there is
    room again."""
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240):
        models = [f"--model={name}={tiny_folder}" for name in (mesh.model, "other")]
        await mesh.start("control", "control", *models, "--max-queued-requests", str(LIMIT))
        await mesh.start("bridge", "bridge", "--port", "0")
        await mesh.until_ready()
        url = f"http://127.0.0.1:{await mesh.bridge_port('bridge')}"
        body = {"model": mesh.model, "prompt": "The sea is", "max_tokens": 3, "ignore_eos": True}
        async with mesh.client() as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
            streams = [
                await client.submit(mesh.request("The sea is", max_tokens=3)) for _ in range(LIMIT)
            ]
            for stream in streams:
                await stream.accepted()
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
            elsewhere = await client.submit(mesh.request("The sea is", model="other"))
            await elsewhere.accepted()
            await mesh.start_worker(
                "both-0", "both", tiny_folder, "--engine", "simulated", "--speed", "20"
            )
            async with task_scope() as tasks:
                for stream in streams:
                    tasks.create_task(_read(stream))
                await mesh.until_ready("both-0")
                while any(stream.end is None for stream in streams):
                    await asyncio.sleep(0.01)
            while (answer := await http.post("/v1/completions", json=body)).status_code == 429:
                await asyncio.sleep(float(answer.headers["retry-after"]))
            assert answer.status_code == 200
            await ask(client, mesh.request("The sea is", max_tokens=3))


async def _read(stream: object) -> None:
    async for _ in stream:  # type: ignore[attr-defined]
        pass
