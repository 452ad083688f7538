"""From a worker's configuration to its engine."""

from __future__ import annotations

from pathlib import Path

from infra.config import WorkerConfig
from infra.model_folder import ModelFolder, open_model_folder
from pipeline.cost_fit import PARTS, Part
from pipeline.cost_model import scaled
from schemas.profiles import WorkerProfile
from schemas.subjects import served
from workers.engine.engine import Engine, EngineConfig
from workers.engine.simulated import DEFAULT_COSTS, build_simulated

# Of a simulated engine whose profile does not say: its blocks are not of a real one's size.
_NUM_SIMULATED_BLOCKS = 4096
_NUM_SIMULATED_HOST_BLOCKS = 4 * _NUM_SIMULATED_BLOCKS


def build_engine(config: WorkerConfig, profile: WorkerProfile | None = None) -> tuple[Engine, str]:
    """The engine, and the ``<model@rev>`` under which it is served. Takes seconds.

    Args:
        profile: what its steps cost. A simulated engine takes the time that it says, and has the
            KV cache that it says; another one says so of itself until it knows better.

    Raises:
        ModelUnsupported: the model folder can't be served.
    """
    facts = open_model_folder(Path(config.model.source))
    if config.engine == "simulated":
        engine = _simulated(config, facts, profile)
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
            config=_limits(config),
        )
    engine.meter.parts = parts_of(config)
    if profile is not None:
        engine.meter.begin_with(profile)
    return engine, served(config.model.name, facts.revision)


def parts_of(config: WorkerConfig) -> tuple[Part, ...]:
    """What the worker does, of a step's parts: they are called as the roles."""
    return tuple(part for part in PARTS if part in config.roles)


def _simulated(config: WorkerConfig, facts: ModelFolder, profile: WorkerProfile | None) -> Engine:
    num_blocks, num_host_blocks = _NUM_SIMULATED_BLOCKS, _NUM_SIMULATED_HOST_BLOCKS
    token_bytes = 0
    if profile is not None:
        token_bytes = profile.kv_token_bytes
        num_blocks = profile.kv_tokens // config.block_size or num_blocks
        if token_bytes:
            num_host_blocks = config.kv_host_memory // (token_bytes * config.block_size)
    costs = DEFAULT_COSTS if profile is None else profile.costs
    return build_simulated(
        facts.path,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks if config.kv_host_memory else 0,
        block_size=config.block_size,
        context_length=facts.context_length,
        eos_token_ids=facts.eos_token_ids,
        costs=scaled(costs, 1 / config.speed),
        token_bytes=token_bytes,
        config=_limits(config),
    )


def _limits(config: WorkerConfig) -> EngineConfig:
    return EngineConfig(
        max_num_sequences=config.max_num_sequences, max_batch_tokens=config.max_batch_tokens
    )
