"""The processes of a mesh on this host: who they are, from heartbeats, and signals to them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

from infra.bus import Bus, Msg
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat
from schemas.errors import ConfigError, MeshError, SchemaError

POLL_S = 0.02
_BROKER = "nats-server"


class NotWhole(MeshError):
    """A process that was there before the fault did not come back."""

    code = "mesh_not_whole"


async def until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again, for what other processes do; False when it does not come in time."""
    ends_s = time.monotonic() + timeout_s
    while True:
        if is_so():
            return True
        if time.monotonic() > ends_s:
            return False
        await asyncio.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Target:
    """A process to strike. ``worker`` is its worker id where it has one."""

    pid: int
    name: str
    worker: str = ""


class ChaosMesh:
    """A mesh whose processes run on this host.

    Args:
        bus: as a user who hears heartbeats.
        bridges: addresses, ``http://host:port``.
        broker_url: of the broker, which sends no heartbeats.
    """

    def __init__(self, bus: Bus, bridges: tuple[str, ...], broker_url: str) -> None:
        self.bus = bus
        self.bridges = bridges
        self._broker_port = urlsplit(broker_url).port or 4222
        self._beats: dict[str, tuple[Beat, float]] = {}  # by process: the last, and when
        self._handles: dict[int, psutil.Process] = {}  # everybody ever heard: a pid comes back
        self._stopped: set[int] = set()
        self._whole: Counter[tuple[str, ...]] = Counter()
        self._broker = self._find_broker()

    async def watch(self) -> None:
        """Hear heartbeats from now on."""
        await self.bus.subscribe(subjects.ALL_BEATS, self._hear)

    def _hear(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):
            beat = decode(message.data, Beat)
            if beat.state == "gone":
                self._beats.pop(beat.process, None)
                return
            self._beats[beat.process] = (beat, time.monotonic())
            if beat.pid not in self._handles:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._handles[beat.pid] = psutil.Process(beat.pid)

    # -- who ------------------------------------------------------------------------------------

    def ready(self, kind: str, role: str = "") -> list[Beat]:
        """Processes that say they are ready, and run, by process id."""
        return [beat for beat in self.present(kind, role) if beat.pid not in self._stopped]

    def present(self, kind: str, role: str = "") -> list[Beat]:
        """As :meth:`ready`, and those that stand still just now."""
        now_s, found = time.monotonic(), []
        for process in sorted(self._beats):
            beat, heard_s = self._beats[process]
            is_asked = beat.kind == kind and (not role or role in beat.roles)
            is_fresh = now_s - heard_s <= self.bus.times.dead_s and beat.state == "ready"
            if is_asked and is_fresh and self._lives(beat.pid):
                found.append(beat)
        return found

    def is_ready(self, process: str, since_s: float) -> bool:
        """Whether it said so after the monotonic ``since_s``."""
        beat, heard_s = self._beats.get(process, (None, 0.0))
        return beat is not None and beat.state == "ready" and heard_s > since_s

    def process(self, process: str) -> Target | None:
        """A process by its id."""
        known = self._beats.get(process)
        return self.target(known[0]) if known else None

    def target(self, beat: Beat) -> Target:
        """The process behind a beat."""
        return Target(beat.pid, beat.process, beat.worker)

    def worker(self, worker: str) -> Target | None:
        """The process that last beat under this worker id."""
        for beat, _ in self._beats.values():
            if beat.worker == worker:
                return self.target(beat)
        return None

    def bridge(self, url: str) -> Target | None:
        """The process that listens at a bridge's address."""
        port = urlsplit(url).port or 80
        for beat in self.present("bridge"):
            if port in _ports_of(self._handles[beat.pid]):
                return self.target(beat)
        return None

    @property
    def broker(self) -> Target:
        """The broker's process now.

        Raises:
            NotWhole: none listens at its address.
        """
        if not self._broker.is_running() or self._broker.status() == psutil.STATUS_ZOMBIE:
            self._broker = self._find_broker()
        return Target(self._broker.pid, "broker")

    def _find_broker(self) -> psutil.Process:
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == _BROKER and self._broker_port in _ports_of(process):
                self._handles[process.pid] = process
                return process
        raise NotWhole(f"no {_BROKER} of this host listens on port {self._broker_port}")

    def _lives(self, pid: int) -> bool:
        handle = self._handles.get(pid)
        if handle is None:
            return False
        try:
            return handle.is_running() and handle.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def left_over(self) -> list[Target]:
        """Processes that were ever heard of and still live."""
        names = {beat.pid: beat.process for beat, _ in self._beats.values()}
        return [Target(pid, names.get(pid, "unknown")) for pid in self._handles if self._lives(pid)]

    def silent(self) -> list[Target]:
        """Processes of ours that live, are not stopped, and have not been heard for long."""
        limit_s = time.monotonic() - 4 * self.bus.times.dead_s
        loud = {beat.pid for beat, heard_s in self._beats.values() if heard_s > limit_s}
        return [
            target
            for target in self.left_over()
            if target.pid not in loud | self._stopped | {self._broker.pid}
        ]

    # -- signals --------------------------------------------------------------------------------

    def send(self, target: Target, number: signal.Signals) -> None:
        """Send a signal; nothing happens to a process that has ended."""
        handle = self._handles[target.pid]
        if number == signal.SIGSTOP:
            self._stopped.add(target.pid)
        elif number in (signal.SIGCONT, signal.SIGKILL):
            self._stopped.discard(target.pid)
        with contextlib.suppress(psutil.NoSuchProcess):  # also when the pid is another's by now
            handle.send_signal(number)

    def stopped_of_each_role(self) -> list[Target]:
        """Stopped workers, one for each set of roles."""
        found = {
            beat.roles: self.target(beat)
            for beat, _ in self._beats.values()
            if beat.pid in self._stopped and beat.worker
        }
        return list(found.values())

    def wake_all(self) -> None:
        """Let everybody go on who was stopped here."""
        for pid in list(self._stopped):
            self.send(Target(pid, ""), signal.SIGCONT)

    # -- whole ----------------------------------------------------------------------------------

    def note_whole(self) -> None:
        """What is there now is what a whole mesh has."""
        self._whole = self._counts()
        for kind in ("control", "bridge", "worker"):
            if not self.ready(kind):
                raise ConfigError(f"no {kind} of this mesh is ready", param="nats")

    async def until_whole(self, timeout_s: float) -> None:
        """Wait until as many of each kind and role are ready as at the beginning.

        Raises:
            NotWhole: they are not in time.
        """
        if not await until(lambda: self.bus.is_connected and not self._missing(), timeout_s):
            missing = ", ".join(" ".join(kind) for kind in self._missing()) or "the bus"
            raise NotWhole(f"not back within {timeout_s:.0f} s: {missing}")

    def _missing(self) -> Counter[tuple[str, ...]]:
        return self._whole - self._counts()

    def _counts(self) -> Counter[tuple[str, ...]]:
        kinds = ("control", "bridge", "worker")
        return Counter((b.kind, *b.roles) for kind in kinds for b in self.ready(kind))


def _ports_of(process: psutil.Process) -> set[int]:
    try:
        return {
            connection.laddr.port
            for connection in process.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return set()
