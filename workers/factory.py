"""From a worker's configuration to its engine."""

from __future__ import annotations

from pathlib import Path

from infra.config import WorkerConfig
from infra.model_folder import open_model_folder
from pipeline.cost_model import scaled
from schemas.subjects import served
from workers.engine.engine import Engine, EngineConfig
from workers.engine.simulated import DEFAULT_COSTS, build_simulated

_NUM_SIMULATED_HOST_BLOCKS = 16384  # four times its pool: its blocks are not of a real one's size


def build_engine(config: WorkerConfig) -> tuple[Engine, str]:
    """The engine, and the ``<model@rev>`` under which it is served. Takes seconds.

    Raises:
        ModelUnsupported: the model folder can't be served.
    """
    facts = open_model_folder(Path(config.model.source))
    limits = EngineConfig(
        max_num_sequences=config.max_num_sequences, max_batch_tokens=config.max_batch_tokens
    )
    if config.engine == "simulated":
        engine = build_simulated(
            facts.path,
            num_host_blocks=_NUM_SIMULATED_HOST_BLOCKS if config.kv_host_memory else 0,
            block_size=config.block_size,
            context_length=facts.context_length,
            eos_token_ids=facts.eos_token_ids,
            costs=scaled(DEFAULT_COSTS, 1 / config.speed),
            config=limits,
        )
    else:
        from workers.engine.build import build_torch_engine  # torch, only where it is needed

        engine = build_torch_engine(
            facts.path,
            device=config.device,
            dtype=config.dtype,
            kernels=config.kernels,
            kv_bytes=config.kv_memory,
            host_bytes=config.kv_host_memory,
            block_size=config.block_size,
            num_threads=config.threads,
            config=limits,
        )
    return engine, served(config.model.name, facts.revision)
