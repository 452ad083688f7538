"""The profile with which a worker begins: one that it is told, or one of workers like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from infra.bus import Bus
from infra.config import WorkerConfig
from infra.log import Logger
from pipeline.cost_model import scaled
from pipeline.profile_files import find_profile, is_file_name
from pipeline.profiles import ProfileBook
from schemas.errors import BusUnavailable
from schemas.profiles import WorkerProfile
from workers.engine.api import EngineInfo
from workers.engine.engine import Engine

_CPU: Final = ".cpu-"  # before the number of threads


def own_name(served: str, info: EngineInfo, num_threads: int) -> str:
    """What a profile of workers like this one is called:
    ``<model@rev>.native-bf16.cpu-2`` on two threads, ``<model@rev>.cuda-bf16.NVIDIA-H200``."""
    device = f".{info.device}" if info.device else f"{_CPU}{num_threads}"
    return f"{served}.{info.label}{device}".replace(" ", "-")


async def named_profile(bus: Bus, config: WorkerConfig) -> WorkerProfile | None:
    """The one that the setting names; None where it names none.

    Raises:
        ConfigError: there is none of that name, or the file can't be used.
        BusUnavailable: the bus is away.
    """
    if config.profile is None:
        return None
    if is_file_name(config.profile):
        return find_profile(config.profile)
    return find_profile(config.profile, await ProfileBook(bus).all())


async def begin_with_own(
    bus: Bus, engine: Engine, served: str, num_threads: int, log: Logger
) -> None:
    """Let the engine's costs begin as workers like it were measured, if they were. A simulated one
    knows its own."""
    if engine.meter.costs is not None:
        return
    name = own_name(served, engine.info, num_threads)
    try:
        found = _nearest(name, await ProfileBook(bus).all())
    except BusUnavailable as error:
        log.warning("profile_not_read", profile=name, reason=error.message)
        return
    if found is not None:
        engine.meter.begin_with(found)
    log.info("profile_looked_up", profile=name, found="" if found is None else found.name)


def _nearest(name: str, registered: Mapping[str, WorkerProfile]) -> WorkerProfile | None:
    """The profile of that name; or that of the same on another number of threads, as if time went
    with their number: the worker's own steps will tell how far that is so."""
    if name in registered:
        return registered[name]
    stem, cpu, own = name.rpartition(_CPU)
    others = {one.rpartition(_CPU)[2]: one for one in registered if one.rpartition(_CPU)[0] == stem}
    counts = [int(count) for count in others if count.isdecimal() and int(count)]
    if not cpu or not counts:
        return None
    nearest = min(counts, key=lambda count: abs(count - int(own)))
    found = registered[others[str(nearest)]]
    return msgspec.structs.replace(found, costs=scaled(found.costs, nearest / int(own)))
