"""fp32: what comes from disk after a restart gives the tokens of an engine that computed it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from pipeline.prefix_hash import prefix_hashes
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.torch_engines import Run, greedy, prompts, small_engine
from workers.engine.build import build_torch_engine
from workers.engine.engine import Engine, EngineConfig
from workers.kv.api import BlockName
from workers.kv.disk import DiskPlan
from workers.kv.tiers import Tiers, make_tiers

Until = Callable[..., Awaitable[None]]
BLOCK_SIZE = 4
HOST_BLOCKS = 200
SALT = b"salt" * 4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def start(folder: Path, disk: Path) -> tuple[Engine, Tiers]:
    """A worker's engine with all its tiers."""
    block_bytes = small_engine(folder, num_blocks=1).info.block_bytes
    engine = build_torch_engine(
        folder,
        dtype="fp32",
        kernels="general",
        num_blocks=60,
        host_bytes=HOST_BLOCKS * block_bytes,
        block_size=BLOCK_SIZE,
        config=EngineConfig(max_batch_tokens=13, max_num_sequences=13),
    )
    plan = DiskPlan(directory=disk, quota_bytes=10**8, slow_s=1e9)  # test machines are busy
    tiers = make_tiers(engine, disk=plan)
    tiers.start(lambda: None)
    return engine, tiers


async def answers(
    engine: Engine, asked: list[tuple[int, ...]], until: Until | None = None
) -> dict[str, list[int]]:
    """One after the other; blocks may be on their way from the host tier."""
    run = Run(engine)
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy(6), salt=SALT)
        if until is not None:
            await until(partial(_step, run, str(number)))
        else:
            run.to_end()
    return run.tokens


def _step(run: Run, key: str) -> bool:
    """A step, or time for the mover's thread; whether the request has ended."""
    run.engine.collect()
    if run.engine.has_work():
        run.step()
    return key in run.finished


def names(prompt: tuple[int, ...]) -> list[BlockName]:
    hashes = prefix_hashes(prompt, BLOCK_SIZE, SALT)
    return [
        BlockName(block_hash=own, parent=parent)
        for own, parent in zip(hashes, [SALT, *hashes], strict=False)
    ]


def has_all(tiers: Tiers, asked: list[tuple[int, ...]]) -> bool:
    """Whether every full block of these prompts is on disk."""
    assert tiers.disk is not None
    tier = tiers.disk.tier
    return all(tier.has(name.block_hash) for prompt in asked for name in names(prompt))


@pytest.mark.parametrize("flip", [False, True], ids=["whole", "corrupt"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
async def test_a_restart_does_not_change_a_token(
    architecture: str, flip: bool, tiny_folder: TinyFolder, tmp_path: Path, until: Until
) -> None:
    """Given prompts that were answered before, and files of which some may be wrong: answers after
    the restart are those of an engine without tiers, and what is right was not computed."""
    folder = tiny_folder(architecture)
    stems = prompts((37, 21, 30), vocab_size=VOCAB_SIZE)
    more = prompts((5,), vocab_size=VOCAB_SIZE, seed=2)[0]
    later = [stem + more for stem in stems]
    plain = await answers(small_engine(folder, num_blocks=400), later)

    engine, tiers = start(folder, tmp_path / "w")
    await answers(engine, stems, until)
    await until(partial(has_all, tiers, stems))
    tiers.close()
    engine.pool.close()
    if flip:
        for path in sorted((tmp_path / "w").glob("*/*.kv"))[::5]:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    engine, tiers = start(folder, tmp_path / "w")
    await until(partial(has_all, tiers, stems))
    assert tiers.disk is not None
    num_brought = [await tiers.disk.load(names(prompt), 60.0) for prompt in later]
    assert sum(num_brought) > 0
    assert await answers(engine, later, until) == plain
    assert tiers.tally.count("host", "promoted") > 0
    assert tiers.tally.count("host", "corrupt") == 0
    if flip:
        assert tiers.tally.count("disk", "corrupt") > 0
    else:
        assert sum(num_brought) == sum(len(names(stem)) for stem in stems)
    tiers.close()
    engine.pool.close()
