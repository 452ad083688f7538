"""``mesh chaos --quick``: a mesh of real processes is broken in every way and loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgen.chaos.settings import QUICK_FAULTS, QUICK_TORCH_FAULTS

MESH = str(Path(sys.executable).with_name("mesh"))
LIMIT_S = 280.0  # a minute on two quiet cores
ZEROS = (
    "lost_tokens", "duplicate_tokens", "wrong_tokens", "usage_errors",
    "failed_requests", "hung_requests", "leaked_blocks", "leaked_processes",
)  # fmt: skip


async def chaos(*flags: str) -> dict[str, Any]:
    """Run to the end; the last line of stdout."""
    process = await asyncio.create_subprocess_exec(
        MESH, "chaos", "--quick", "--json", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:  # its mesh ends with it
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-4000:]
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
async def test_quick_chaos_with_the_simulated_engine() -> None:
    """Eight faults, eight processes: no token is lost, repeated, wrong; nothing fails or leaks."""
    found = await chaos()
    assert {name: found[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert found["engine"] == "simulated"
    assert set(found["by_fault"]) == set(QUICK_FAULTS)
    assert found["faults"] == len(QUICK_FAULTS)
    assert found["streams"] > 5 * len(QUICK_FAULTS)
    assert found["recovery_s"]["p50"] > 0


@pytest.mark.slow
async def test_quick_chaos_with_the_real_engine(tiny_folder: Path) -> None:
    """The same with a model in fp32: what one worker began another goes on with, token for
    token."""
    found = await chaos("--engine", "torch", "--model", f"tiny={tiny_folder}")
    assert {name: found[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert found["engine"] in ("native fp32", "torch fp32")
    assert set(found["by_fault"]) == set(QUICK_TORCH_FAULTS)
