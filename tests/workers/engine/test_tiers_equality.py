"""fp32: with a host tier, whatever moves between the tiers, the tokens are those without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infra.transport.shm import SharedPool
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.torch_engines import Run, greedy, prompts, small_engine
from workers.engine.build import build_torch_engine
from workers.engine.device.load import load_on_device
from workers.engine.device.select import CPU
from workers.engine.engine import Engine, EngineConfig
from workers.engine.loader import load_model
from workers.engine.output import Vocabulary
from workers.engine.runner import layout_of
from workers.kv.tiers import Tiers, make_tiers

HOST_BLOCKS = 120


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiered_engine(folder: Path, num_blocks: int) -> tuple[Engine, Tiers]:
    bytes_per_block = small_engine(folder, num_blocks=1).info.block_bytes
    engine = build_torch_engine(
        folder,
        dtype="fp32",
        kernels="general",
        num_blocks=num_blocks,
        host_bytes=HOST_BLOCKS * bytes_per_block,
        block_size=4,
        config=EngineConfig(max_batch_tokens=13, max_num_sequences=13),
    )
    return engine, make_tiers(engine)


def staged_engine(folder: Path, num_blocks: int) -> tuple[Engine, Tiers]:
    """One whose runner has memory of its own, as on a GPU."""
    loaded = load_model(folder, "fp32")
    layout = layout_of(loaded, block_size=4)
    pool = SharedPool(num_blocks + HOST_BLOCKS, layout.block_bytes)
    runner = load_on_device(loaded, layout, pool.slots[:num_blocks], CPU, max_batch=8)
    config = EngineConfig(max_batch_tokens=13, max_num_sequences=13)
    engine = Engine(runner, pool, Vocabulary.from_folder(folder), config)
    return engine, make_tiers(engine)


def drain(tiers: Tiers) -> None:
    assert tiers.mover is not None
    while tiers.mover.work():
        pass


def asked_prompts() -> list[tuple[int, ...]]:
    """Three turns of four conversations: each turn begins as the one before it."""
    stems = prompts((37, 21, 30, 26), vocab_size=VOCAB_SIZE)
    more = prompts((5, 7), vocab_size=VOCAB_SIZE, seed=2)
    turns = [
        stems,
        [stem + more[0] for stem in stems],
        [stem + more[0] + more[1] for stem in stems],
    ]
    return [prompt for turn in turns for prompt in turn]


def run_all(run: Run, tiers: Tiers | None, *, flip: bool = False) -> dict[str, list[int]]:
    """Two at a time, so that the pool is always too small for what was there before."""
    asked = asked_prompts()
    for number, prompt in enumerate(asked):
        run.add(str(number), prompt, greedy(9))
        if number % 2 == 0:
            continue
        for _ in range(500):
            if tiers is not None:
                drain(tiers)
            if not run.engine.has_work():
                break
            run.step()
        if flip and tiers is not None and tiers.host is not None and number == 3:
            first = run.engine.blocks.num_blocks
            run.engine.pool.slots[first : first + 4, 5] ^= 1
    return run.to_end()


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2", "llama"])
def test_tiers_do_not_change_a_token(architecture: str, tiny_folder: TinyFolder) -> None:
    """Given a pool in which two conversations hardly fit, so that blocks are evicted, spilled and
    brought back: every answer is that of an engine without tiers and with room for all."""
    folder = tiny_folder(architecture)
    plain = run_all(Run(small_engine(folder, num_blocks=400)), None)
    engine, tiers = tiered_engine(folder, 22)
    assert run_all(Run(engine), tiers) == plain
    assert tiers.tally.count("host", "hit") > 0
    assert engine.scheduler.num_preemptions > 0
    assert tiers.tally.count("host", "corrupt") == 0


def test_a_device_with_memory_of_its_own_changes_none(tiny_folder: TinyFolder) -> None:
    """Blocks go straight between the device and the host tier; nothing else changes."""
    folder = tiny_folder("llama")
    plain = run_all(Run(small_engine(folder, num_blocks=400)), None)
    engine, tiers = staged_engine(folder, 22)
    assert run_all(Run(engine), tiers) == plain
    assert tiers.tally.count("host", "hit") > 0


def test_corrupt_blocks_do_not_change_a_token(tiny_folder: TinyFolder) -> None:
    """Bits that flipped in host memory: noticed, counted, and the answers stay."""
    folder = tiny_folder("llama")
    plain = run_all(Run(small_engine(folder, num_blocks=400)), None)
    engine, tiers = tiered_engine(folder, 22)
    assert run_all(Run(engine), tiers, flip=True) == plain
    assert tiers.tally.count("host", "corrupt") > 0
