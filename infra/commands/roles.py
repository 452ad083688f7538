"""``mesh control``, ``mesh worker``, ``mesh bridge``: one process each."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from infra.commands.keys import check_key_file
from infra.config import BridgeConfig, BusConfig, ControlConfig, WorkerConfig
from infra.options import takes
from infra.parse import ModelSource

if TYPE_CHECKING:
    from infra.process import RoleContext


@takes(ControlConfig)
def control(config: ControlConfig) -> None:
    """Run admission and router."""
    from infra.process import run_process

    config = replace(config, models=tuple(resolved_model(one, config.bus) for one in config.models))

    async def body(ctx: RoleContext) -> None:
        from pipeline.control import serve_control

        await serve_control(ctx, config)

    raise typer.Exit(run_process("control", config, body))


@takes(WorkerConfig)
def worker(config: WorkerConfig) -> None:
    """Run a worker: an engine with one model that takes prefill tasks, decode tasks or both."""
    os.environ.update(config.thread_environment())  # torch reads it once, when imported
    from infra.process import run_process

    config = replace(config, model=resolved_model(config.model, config.bus))

    async def body(ctx: RoleContext) -> None:
        if config.crew is not None:
            from workers.crew.service import serve_crew

            await serve_crew(ctx, config)
            return
        from workers.service import serve_worker

        await serve_worker(ctx, config)

    raise typer.Exit(run_process("worker", config, body))


@takes(BridgeConfig)
def bridge(config: BridgeConfig) -> None:
    """Run the HTTP bridge: OpenAI's API in front of the bus."""
    check_key_file(config)
    if config.processes > 1:
        from infra.bridge_group import run_bridge_group

        raise typer.Exit(run_bridge_group(config))
    from infra.process import run_process

    async def body(ctx: RoleContext) -> None:
        from pipeline.bridge.app import serve_bridge

        await serve_bridge(ctx, config)

    raise typer.Exit(run_process("bridge", config, body))


def resolved_model(model: ModelSource, bus: BusConfig) -> ModelSource:
    """The same model with a folder as its source; converts or fetches it where needed.

    Raises:
        ConfigError, ModelUnsupported: as ``workers.engine.sources.resolve_source``.
    """
    from workers.engine.sources import resolve_source

    return ModelSource(model.name, str(resolve_source(model.source, bus.model_cache)))
