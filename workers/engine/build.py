"""From a model folder to a torch engine."""

from __future__ import annotations

from pathlib import Path

import torch

from infra.transport.shm import SharedPool
from schemas.errors import ConfigError
from workers.engine.engine import Engine, EngineConfig
from workers.engine.kv_layout import KvLayout
from workers.engine.loader import load_model
from workers.engine.output import Vocabulary
from workers.engine.runner import TorchRunner, layout_of


def build_torch_engine(
    folder: Path | str,
    *,
    dtype: str = "auto",
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    block_size: int = 16,
    num_threads: int | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """Load a model and put an engine around it. Takes seconds.

    Args:
        dtype: of weights and KV cache; see :func:`workers.engine.loader.load_model`.
        num_blocks, kv_bytes: the size of the KV pool; one of them. Memory is taken as blocks are
            written, not at once. From ``kv_bytes`` no more blocks are made than all sequences of
            full length could fill.
        num_threads: what torch may use in this process; None leaves it as it is.

    Raises:
        ModelUnsupported: the model can't be served.
        ConfigError: the pool has room for less than one block, or an unknown dtype.
    """
    if (num_blocks is None) == (kv_bytes is None):
        raise ConfigError("give either num_blocks or kv_bytes", param="kv_memory")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    config = config or EngineConfig()
    loaded = load_model(folder, dtype)
    layout = layout_of(loaded, block_size=block_size)
    if kv_bytes is not None:
        blocks_per_sequence = -(-loaded.facts.context_length // block_size)
        most = blocks_per_sequence * config.max_num_sequences
        num_blocks = min(most, _num_blocks(kv_bytes, layout))
    assert num_blocks is not None
    pool = SharedPool(num_blocks, layout.block_bytes)
    runner = TorchRunner(loaded, layout, pool.slots)
    engine = Engine(runner, pool, Vocabulary.from_folder(loaded.facts.path), config)
    return engine


def _num_blocks(kv_bytes: int, layout: KvLayout) -> int:
    num_blocks = kv_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{kv_bytes} bytes hold no block of {layout.block_bytes}", param="kv_memory"
        )
    return num_blocks
