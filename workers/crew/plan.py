"""The file that says which workers a crew is made of: JSON, as ``mesh simulate --bus`` writes it.

{"workers": [{"name": "prefill-1", "role": "prefill", "num_blocks": 4096,
              "costs": {"prefill_base_ms": 18.1, …}}, …]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from infra.parse import process_name
from schemas.errors import ConfigError
from schemas.profiles import StepCosts

MAX_CREW = 1024  # workers of one process
_SETTING = "worker.crew"


class CrewWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated worker. ``costs`` are those of its hardware; the process's ``speed`` divides
    them."""

    name: str
    role: Literal["prefill", "decode", "both"]
    costs: StepCosts
    num_blocks: int  # of its KV cache
    max_num_sequences: int = 64
    max_batch_tokens: int = 512
    profile: str = ""  # the WorkerProfile that its costs are from
    kv_token_bytes: int = 0  # of what it stands for: its own KV has 8 bytes per token
    host: str = ""  # that others are told; "": this one
    rack: str = ""
    zone: str = ""


class Crew(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All workers of one process."""

    workers: tuple[CrewWorker, ...]


def read_crew(path: Path) -> tuple[CrewWorker, ...]:
    """The workers of a file.

    Raises:
        ConfigError: it can't be read, or the worker and field that is wrong.
    """
    try:
        crew = msgspec.json.decode(path.read_bytes(), type=Crew)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", param=_SETTING) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}", param=_SETTING) from error
    _check(crew, path)
    return crew.workers


def write_crew(workers: tuple[CrewWorker, ...], path: Path) -> None:
    """Write what :func:`read_crew` reads.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(Crew(workers=workers)), indent=1))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", param=_SETTING) from error


def _check(crew: Crew, path: Path) -> None:
    if not 0 < len(crew.workers) <= MAX_CREW:
        raise ConfigError(f"{path} has {len(crew.workers)} workers", param=_SETTING)
    seen: set[str] = set()
    for position, worker in enumerate(crew.workers):
        where = f"{path}: $.workers[{position}]"
        try:
            process_name(worker.name)
        except ValueError as error:
            raise ConfigError(f"{where}.name: {error}", param=_SETTING) from error
        if worker.name in seen:
            raise ConfigError(f"{where}.name: {worker.name!r} is there twice", param=_SETTING)
        seen.add(worker.name)
        if (wrong := _fault(worker)) is not None:
            raise ConfigError(f"{where}.{wrong}", param=_SETTING)


def _fault(worker: CrewWorker) -> str | None:
    for field, least in (
        ("num_blocks", 1),
        ("max_num_sequences", 1),
        ("kv_token_bytes", 0),
    ):
        if (value := getattr(worker, field)) < least:
            return f"{field}: {value} is less than {least}"
    if worker.max_batch_tokens < worker.max_num_sequences:
        return f"max_batch_tokens: {worker.max_batch_tokens} is less than max_num_sequences"
    for field in StepCosts.__struct_fields__:
        if not 0 <= (ms := getattr(worker.costs, field)) < float("inf"):
            return f"costs.{field}: {ms} is no time"
    return None
