"""Requests that harm their workers: what becomes of them, and of everybody else's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from infra.bus import DEAD
from schemas import subjects
from schemas.codec import decode, unpack_ids
from schemas.control import DeadLetter
from schemas.errors import Poisoned
from schemas.requests import RequestRecord
from tests.e2e.harness import Mesh, Role, ask, mesh_of
from tests.e2e.odd_worker import BLOCK, BLOCKED, DIE
from tests.e2e.test_takeover import read_rest

SCRIPT = Path(__file__).with_name("odd_worker.py")
SPEED = "20"


async def start_odd(mesh: Mesh, name: str, folder: Path, *flags: str) -> Role:
    """A worker for both roles that prompts can harm."""
    command = [sys.executable, str(SCRIPT), "worker", "--name", name, "--role", "both"]
    model = ["--model", f"{mesh.model}={folder}", "--engine", "simulated", "--speed", SPEED]
    return await mesh.start_command("worker", name, [*command, *model, *flags])


async def test_a_request_that_kills_three_workers_does_not_kill_a_fourth(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """It becomes a dead letter with its whole record and an error for its client; the worker that
    is left serves the next one."""
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240):
        await mesh.start("control", "control", "--model", f"{mesh.model}={tiny_folder}")
        names = [f"odd-{number}" for number in range(4)]
        for name in names:
            await start_odd(mesh, name, tiny_folder)
        await mesh.until_ready()
        async with mesh.client() as client:
            request = mesh.request((5, *DIE, 6), max_tokens=8)
            stream = await client.submit(request)
            with pytest.raises(Poisoned):
                await read_rest(stream, [])
            alive = [name for name in names if mesh.roles[name].process.poll() is None]
            assert len(alive) == 1
            assert stream.view.epoch == 4
            stored = await mesh.bus.last_message(DEAD, subjects.DEAD)
            assert stored is not None
            letter = decode(stored.data, DeadLetter)
            assert (letter.code, letter.payload_bytes) == ("poisoned", len(letter.payload))
            record = decode(letter.payload, RequestRecord)
            assert record.request_id == request.request_id
            assert unpack_ids(record.prompt_ids) == [5, *DIE, 6]
            answer = await ask(client, mesh.request((5, 6, 7), max_tokens=8, ignore_eos=True))
            assert len(answer.ids[0]) == 8
            await mesh.until_idle()


async def test_a_stuck_engine_is_not_ready_and_holds_nobody_up(
    tmp_path: Path, tiny_folder: Path
) -> None:
    """/ready and beats say why; another worker goes on with its request, token for token; it is
    ready again, as a new worker, when its engine moves."""
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240):
        await mesh.start("control", "control", "--model", f"{mesh.model}={tiny_folder}")
        for name in ("odd-0", "odd-1"):
            await start_odd(mesh, name, tiny_folder, "--max-step-s", "0.5")
        await mesh.until_ready()
        async with mesh.client() as client:
            prompt = (5, *BLOCK, 6)
            stream = await client.submit(
                mesh.request(prompt, max_tokens=12, ignore_eos=True, seed=1)
            )
            answer = await read_rest(stream, [])
            again = await ask(client, mesh.request(prompt, max_tokens=12, ignore_eos=True, seed=1))
            assert answer.ids == again.ids
            (stuck,) = [name for name in ("odd-0", "odd-1") if mesh.state(name) == "starting"]
            beat = mesh.beat_of(stuck)
            assert beat.reason == "engine: no step ended for 0.5 s"
            assert beat.worker == ""
            async with httpx.AsyncClient() as http:
                ready = await http.get(f"http://127.0.0.1:{beat.health_port}/ready")
            assert ready.status_code == 503
            assert ready.json()["failing"] == {"engine": "no step ended for 0.5 s"}
            (tmp_path / BLOCKED).unlink()
            await mesh.until_ready(stuck)
            await mesh.until_idle()
