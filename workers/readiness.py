"""Whether a worker could do its work now: its engine moves on, its KV door lets readers in.

The bus is looked at by every process itself (``infra/process.py``). Who is not able takes nothing
new; a worker whose engine is stuck gives up its id, so that others go on with what it had.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Protocol

from infra.health import Health
from infra.log import Logger
from infra.pulse import next_pulse
from infra.task_scope import task_scope
from infra.times import Times
from schemas.errors import KvLost
from workers.engine.thread import EngineThread

_LOOKS_PER_BEAT = 2
_KNOCK_BEATS = 4  # between two knocks at our own door
_NUM_KNOCKS = 2  # without an answer: the first time our own loop may have been busy


class Door(Protocol):
    """The ways into a KV pool: ``workers.kv.links.KvLinks``."""

    async def knock(self) -> None:
        """KvLost when a reader with a lease would not be let in now."""


@dataclass(slots=True, kw_only=True)
class Readiness:
    """What :meth:`watch` found when it last looked; able until it has."""

    thread: EngineThread
    door: Door
    is_engine_stuck: bool = False
    is_door_shut: bool = False

    @property
    def is_able(self) -> bool:
        """Whether there is sense in giving it work."""
        return not (self.is_engine_stuck or self.is_door_shut)

    async def watch(self, health: Health, log: Logger, times: Times, max_step_s: float) -> None:
        """Look, and tell ``health``, until cancelled.

        Args:
            max_step_s: a step of the engine, or a call to it, that takes longer is stuck.
        """
        async with task_scope() as tasks:
            tasks.create_task(self._watch_engine(health, log, times, max_step_s), name="engine")
            tasks.create_task(self._watch_door(health, log, times), name="door")
            await asyncio.Event().wait()

    async def until_engine_moves(self, draining: asyncio.Event, times: Times) -> None:
        """Wait while the engine is stuck, unless the process drains."""
        while self.is_engine_stuck and not draining.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(times.beat_s / _LOOKS_PER_BEAT):
                    await draining.wait()

    async def _watch_engine(
        self, health: Health, log: Logger, times: Times, max_step_s: float
    ) -> None:
        while True:
            is_stuck = self.thread.is_stuck(max_step_s)
            health.set("engine", not is_stuck, f"no step ended for {max_step_s:g} s")
            if is_stuck and not self.is_engine_stuck:
                log.error("engine_stuck", after_s=max_step_s)
            self.is_engine_stuck = is_stuck
            await next_pulse(times.beat_s / _LOOKS_PER_BEAT)

    async def _watch_door(self, health: Health, log: Logger, times: Times) -> None:
        num_missed = 0
        while True:
            try:
                await self.door.knock()
            except KvLost as error:
                num_missed += 1
                if num_missed >= _NUM_KNOCKS:
                    health.set("kv door", False, error.message)
                    if not self.is_door_shut:
                        log.error("kv_door_shut", reason=error.message)
                    self.is_door_shut = True
            else:
                num_missed, self.is_door_shut = 0, False
                health.set("kv door", True)
            await next_pulse(_KNOCK_BEATS * times.beat_s)
