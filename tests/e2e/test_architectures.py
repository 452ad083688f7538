"""Tiny random models of many architectures, prefill in one process and decode in another."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from pipeline.client import MeshClient
from tests.e2e.harness import Mesh, ask, mesh_of
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model
from tests.workers.engine.torch_engines import generate, prompts, reference_model
from workers.engine.native.load import why_not_native

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

NUM_TOKENS = 12
CHOSEN = tuple(sorted(ARCHITECTURES))
SCRIPT = Path(__file__).parent / "many_workers.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("architectures")
    folders = {architecture: tiny_model(base, architecture) for architecture in CHOSEN}
    for folder in folders.values():
        why_not_native(folder)  # compiles the library, for which workers would have to wait
    return folders


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]
) -> AsyncIterator[Mesh]:
    """Control, one process with a prefill worker per architecture, one with the decode workers."""
    models = [f"{name}={folder}" for name, folder in folders.items()]
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as running:
        flags = [word for model in models for word in ("--model", model)]
        await running.start("control", "control", *flags)
        for role in ("prefill", "decode"):
            command = [sys.executable, str(SCRIPT), role, *models]
            await running.start_command("worker", f"all-{role}", command)
        async with asyncio.timeout(240):
            while running.num_ready_workers < 2 * len(models):
                running.check_alive()
                await asyncio.sleep(0.05)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(mesh: Mesh) -> AsyncIterator[MeshClient]:
    async with mesh.client() as connected:
        yield connected


@pytest.mark.parametrize("architecture", CHOSEN)
async def test_answers_are_those_of_transformers(
    mesh: Mesh, client: MeshClient, folders: dict[str, Path], architecture: str
) -> None:
    """fp32, greedy, token for token: prompts that take several chunks, that arrive one after the
    other, and one that begins like an earlier one."""
    asked = prompts((21, 5, 37), vocab_size=VOCAB_SIZE)
    asked.append(asked[2][:30] + asked[0][:9])
    model = reference_model(folders[architecture])
    expected = [generate(model, prompt, NUM_TOKENS) for prompt in asked]
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(ask(client, mesh.request(prompt, model=architecture, **sampling)))
            for prompt in asked[:3]
        ]
    late = await ask(client, mesh.request(asked[3], model=architecture, **sampling))
    got = [list(answer.result().ids[0]) for answer in answers] + [list(late.ids[0])]
    assert got == expected
    assert late.usage.cached_tokens == 28
