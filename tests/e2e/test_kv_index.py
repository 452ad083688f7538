"""What a control process knows of the workers' KV, and tells them."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from tests.e2e.harness import Mesh, ask
from tests.e2e.observer import Observer

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = tuple(10 + number % 50 for number in range(70))
PATIENCE_S = 60.0


async def num_indexed(mesh: Mesh, http: httpx.AsyncClient) -> int:
    """Blocks in the index of the control process."""
    answer = await http.get(f"http://127.0.0.1:{mesh.beat_of('control').health_port}/metrics")
    found = re.search(r"^mesh_kv_index_blocks (\S+)$", answer.text, re.MULTILINE)
    assert found
    return int(float(found[1]))


async def until_indexed(mesh: Mesh, http: httpx.AsyncClient, least: int) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while (count := await num_indexed(mesh, http)) < least:
            await asyncio.sleep(0.02)
    return count


async def test_a_restarted_control_process_knows_what_workers_hold(simulated_mesh: Mesh) -> None:
    """It heard no event of theirs; a heartbeat tells it to ask. The next turn of a conversation
    then names the decode worker, which alone holds the answer of the one before."""
    mesh = simulated_mesh
    control = mesh.roles["control"].process.args
    assert isinstance(control, list)
    async with mesh.client() as client, httpx.AsyncClient() as http:
        first = mesh.request(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
        answer = await ask(client, first)
        num_blocks = (len(PROMPT) + 39) // 16
        before = await until_indexed(mesh, http, num_blocks)
        mesh.roles["control"].kill()
        await mesh.start_command("control", "control", control)
        await mesh.until_ready("control")
        assert await until_indexed(mesh, http, before) == before

        rest = tuple(60 + number % 9 for number in range(300))  # too long for a decode worker
        second = mesh.request((*PROMPT, *answer.ids[0], *rest), max_tokens=4, ignore_eos=True)
        async with Observer.on(mesh.bus) as seen:
            await ask(client, second)
            task = await seen.until("prefill-task/1")
    (source,) = task.fields["kv_sources"]
    assert source["worker"] == mesh.beat_of("decode-0").worker
    assert source["num_blocks"] == num_blocks
    await mesh.until_idle()
