"""Which children ``mesh up`` starts, as commands that a user could type. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from infra.children import ChildSpec
from infra.config import BusConfig, ControlConfig, RoleConfig, UpConfig, WorkerConfig
from infra.parse import ModelSource
from infra.settings import flags_of, variable

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_MODEL_NAME = 24


def mesh_command() -> tuple[str, ...]:
    """The ``mesh`` script beside this interpreter, or the same by ``-m``; both keep a caller's
    own ``schemas/`` folder off the import path."""
    script = Path(sys.executable).with_name("mesh")
    return (str(script),) if script.exists() else (sys.executable, "-P", "-m", "infra.cli")


def plan(
    command: tuple[str, ...],
    config: UpConfig,
    models: tuple[ModelSource, ...],
    url: Callable[[str], str],
) -> list[ChildSpec]:
    """The children, in order of starting.

    Args:
        command: what starts a role, followed by its name and flags.
        models: with folders as their sources.
        url: the broker URL of a role; it holds a password, so it goes by the environment.
    """
    configs: list[RoleConfig] = [
        _numbered(replace(config.control, models=models), number, config.controls)
        for number in range(1, config.controls + 1)
    ]
    for model in models:
        prefix = f"{_short(model, models)}-" if len(models) > 1 else ""
        for role, num in (
            ("prefill", config.num_prefill),
            ("decode", config.num_decode),
            ("both", config.both),
        ):
            for position in range(1, num + 1):
                name = f"{prefix}{role}-{position}"
                configs.append(replace(config.worker, name=name, role=role, model=model))
    return [_spec(command, one, url) for one in [*configs, config.bridge]]


def _numbered(config: ControlConfig, number: int, num: int) -> ControlConfig:
    """One of ``num`` control processes, with a name and a port of its own."""
    if num == 1:
        return config
    port = config.health_port + number - 1 if config.health_port else 0
    return replace(config, name=f"{config.name}-{number}", health_port=port)


def _spec(command: tuple[str, ...], config: RoleConfig, url: Callable[[str], str]) -> ChildSpec:
    kind = config.table
    env = {variable(BusConfig.table, "nats_url"): url(kind)}
    if isinstance(config, WorkerConfig):
        env |= config.thread_environment()
    child = replace(config, bus=replace(config.bus, log_format="json"))
    return ChildSpec(
        kind=kind, name=config.name, command=(*command, kind, *flags_of(child)), env=env
    )


def _short(model: ModelSource, models: tuple[ModelSource, ...]) -> str:
    """A short name that is unlike that of every other model."""
    plain = {one: _NOT_IN_NAMES.sub("-", one.name)[:_MAX_MODEL_NAME] for one in models}
    is_unique = list(plain.values()).count(plain[model]) == 1
    return plain[model] if is_unique else f"{plain[model]}-{models.index(model) + 1}"
