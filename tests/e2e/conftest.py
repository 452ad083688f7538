"""Meshes of real processes, shared by the tests of one module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.harness import Mesh, mesh_of
from tests.tiny_models import tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights."""
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated_mesh(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> AsyncIterator[Mesh]:
    """One prefill and one decode worker with the simulated engine, ready."""
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as mesh:
        await start_simulated(mesh, tiny_folder)
        yield mesh


async def start_simulated(
    mesh: Mesh, folder: Path, *, prefill: int = 1, decode: int = 1, speed: float = 20
) -> None:
    """Control and simulated workers ``prefill-<n>``, ``decode-<n>``; returns when all are ready."""
    mesh.simulated_flags = (str(folder), "--engine", "simulated", "--speed", str(speed))
    await mesh.start("control", "control", "--model", f"{mesh.model}={folder}")
    for role, count in (("prefill", prefill), ("decode", decode)):
        for number in range(count):
            await mesh.start_worker(f"{role}-{number}", role, *mesh.simulated_flags)
    await mesh.until_ready()


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The converted default model, in the user's cache: converted once per machine, as the native
    library is compiled once, before workers wait for it."""
    from workers.engine.native.load import why_not_native
    from workers.engine.sources import DEFAULT_MODEL, default_cache_dir, resolve_source

    folder = resolve_source(DEFAULT_MODEL, default_cache_dir(), print)
    why_not_native(folder)
    return folder
