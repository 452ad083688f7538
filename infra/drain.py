"""Asking one process of a mesh to finish what it has and leave, and watching it do so.

The order is a word on the bus that may be lost, so it is said again until the process's beats show
that it was heard. A drained child of ``mesh up`` is started again, unless the order says that it
is to stay down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from infra.bus import Bus, Msg
from infra.status import LISTEN_BEATS
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat, Drain
from schemas.errors import DeadlineExceeded, EngineFailed, InvalidRequest, SchemaError

Say = Callable[[str], None]


class Drainer:
    """Drains processes, one at a time.

    Args:
        say: called with a line whenever there is something new.
    """

    def __init__(self, bus: Bus, say: Say) -> None:
        self._bus = bus
        self._say = say
        self._beats: dict[str, Beat] = {}  # by process
        self._heard = asyncio.Event()

    async def drain(self, name: str, *, stay_down: bool, timeout_s: float) -> Beat:
        """Find the process called ``name``, ask it to drain, wait until it is gone.

        Args:
            name: a process id, a worker id, or the name in a process id where only one has it.

        Returns:
            Its last beat.

        Raises:
            InvalidRequest: no such process, or several of that name.
            DeadlineExceeded: it is not gone after ``timeout_s``; it goes on draining.
            EngineFailed: it fell silent without saying that it left.
            BusUnavailable: the order can't be given.
        """
        hearing = await self._bus.subscribe(subjects.ALL_BEATS, self._hear)
        try:
            process = await self._find(name)
            async with asyncio.timeout(timeout_s):
                return await self._until_gone(Drain(process=process, stay_down=stay_down))
        except TimeoutError:
            raise DeadlineExceeded(f"not gone after {timeout_s:g} s; it goes on") from None
        finally:
            await hearing.unsubscribe()

    async def _find(self, name: str) -> str:
        loop = asyncio.get_running_loop()
        ends = loop.time() + LISTEN_BEATS * self._bus.times.beat_s
        while loop.time() < ends:
            for beat in self._alive():
                if name in (beat.process, beat.worker):
                    return beat.process
            await self._next_beat(ends - loop.time())
        named = [beat.process for beat in self._alive() if _name_of(beat) == name]
        if len(named) == 1:
            return named[0]
        if named:
            raise InvalidRequest(f"{name!r} may be {', '.join(sorted(named))}", param="name")
        known = ", ".join(sorted(beat.process for beat in self._alive())) or "none"
        raise InvalidRequest(f"no process or worker is called {name!r} (there are: {known})",
                             param="name")  # fmt: skip

    def _alive(self) -> list[Beat]:
        return [beat for beat in self._beats.values() if beat.state != "gone"]

    async def _until_gone(self, order: Drain) -> Beat:
        """Say it until it is heard; then follow."""
        loop, times, shown = asyncio.get_running_loop(), self._bus.times, ""
        heard_s = loop.time()
        before = self._beats[order.process]
        while True:
            beat = self._beats[order.process]
            if beat is not before:
                before, heard_s = beat, loop.time()
            if beat.state == "gone":
                self._say(f"{beat.process} is gone")
                return beat
            if loop.time() - heard_s > 2 * times.dead_s:
                raise EngineFailed(f"{beat.process} fell silent and did not say that it left")
            if beat.state != "draining":
                await self._bus.publish(subjects.control(order.process), encode(order))
            if (line := _progress(beat)) != shown:
                self._say(line)
                shown = line
            await self._next_beat(times.beat_s)

    async def _next_beat(self, timeout_s: float) -> None:
        self._heard.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._heard.wait()

    def _hear(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):  # of a newer version
            beat = decode(message.data, Beat)
            self._beats[beat.process] = beat
            self._heard.set()


def _name_of(beat: Beat) -> str:
    """The name in ``<kind>-<name>-<nonce>``."""
    return beat.process.removeprefix(f"{beat.kind}-").rpartition("-")[0]


def _progress(beat: Beat) -> str:
    word = "is draining" if beat.state == "draining" else "is asked to drain"
    if beat.kind != "worker":
        return f"{beat.process} {word}"
    load = beat.load
    held = load.num_blocks - load.num_free_blocks
    return (
        f"{beat.process} {word}: {load.num_running} running, {load.num_waiting} waiting, "
        f"{held} blocks held"
    )
