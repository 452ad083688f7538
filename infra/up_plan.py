"""Which children ``mesh up`` starts, as commands that a user could type. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from infra.children import ChildSpec
from infra.config import (
    BridgeConfig,
    BusConfig,
    ControlConfig,
    RoleConfig,
    UpConfig,
    WorkerConfig,
)
from infra.http_server import LISTEN_FD
from infra.parse import ModelSource
from infra.settings import flags_of, secrets_of, variable

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_MAX_MODEL_NAME = 24
N = TypeVar("N", ControlConfig, BridgeConfig)


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
    listen_fd: int | None = None,
) -> list[ChildSpec]:
    """The children, in order of starting.

    Args:
        command: what starts a role, followed by its name and flags.
        models: with folders as their sources.
        url: the broker URL of a role; it holds a password, so it goes by the environment.
        listen_fd: the socket that several bridges share.
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
    others = [_spec(command, one, url) for one in configs]
    return others + plan_bridges(command, config.bridge, config.num_bridges, url, listen_fd)


def plan_bridges(
    command: tuple[str, ...],
    config: BridgeConfig,
    num: int,
    url: Callable[[str], str],
    listen_fd: int | None,
) -> list[ChildSpec]:
    """``num`` bridge processes, each with an identity of its own, behind one port."""
    alone = replace(config, processes=1)
    specs = [_spec(command, _numbered(alone, number, num), url) for number in range(1, num + 1)]
    if listen_fd is None:
        return specs
    shared = {LISTEN_FD: str(listen_fd)}
    return [replace(one, fds=(listen_fd,), env={**one.env, **shared}) for one in specs]


def _numbered(config: N, number: int, num: int) -> N:
    """One of ``num`` processes of a kind, with a name and a health port of its own."""
    if num == 1:
        return config
    port = config.health_port + number - 1 if config.health_port else 0
    return replace(config, name=f"{config.name}-{number}", health_port=port)


def _spec(command: tuple[str, ...], config: RoleConfig, url: Callable[[str], str]) -> ChildSpec:
    kind = config.table
    env = secrets_of(config) | {variable(BusConfig.table, "nats_url"): url(kind)}
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
