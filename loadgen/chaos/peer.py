"""The processes of a server that is not ours: struck, woken, started again as they were."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass

import psutil

from infra.children import die_with
from schemas.errors import ConfigError

VERBS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "term": signal.SIGTERM}
END_S = 30.0  # for a process that was told to end


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """What to break: ``verbs`` to each of ``pids`` (by name), in turn."""

    url: str
    model: str
    pids: dict[str, int]
    verbs: tuple[str, ...]
    count: int = 1
    num_streams: int = 10
    num_tokens: int = 60
    freeze_s: float = 10.0
    timeout_s: float = 60.0
    seed: int = 0
    restarts: bool = False  # start again what was ended
    settle_s: float = 15.0  # for what was started again to serve

    def __post_init__(self) -> None:
        for verb in self.verbs:
            if verb not in VERBS:
                raise ConfigError(f"no verb {verb!r}; there are {', '.join(VERBS)}", param="verb")
        if not self.pids or not self.verbs:
            raise ConfigError("give --pid NAME=PID and --verb", param="pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a process was started."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str


class Peer:
    """The processes of a server that is not ours.

    Raises:
        ConfigError: a pid that nobody has, or whose process may not be looked at.
    """

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        self._processes = {name: _process(name, pid) for name, pid in settings.pids.items()}
        self._recipes = {name: _recipe(one) for name, one in self._processes.items()}
        self._started: list[asyncio.subprocess.Process] = []

    def strike(self, name: str, verb: str) -> None:
        """Send the signal; nothing happens to a process that has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes[name].send_signal(VERBS[verb])

    async def mend(self, name: str, verb: str) -> None:
        """Wake what was frozen after its time; start what was ended again, if told to."""
        if verb == "freeze":
            await asyncio.sleep(self._settings.freeze_s)
            self._wake(name)
        elif self._settings.restarts:
            await self._until_ended(name)
            await self.start_anew(name)

    async def _until_ended(self, name: str) -> None:
        """One that we started is waited for by who started it: the loop."""
        process = self._processes[name]
        ours = next((one for one in self._started if one.pid == process.pid), None)
        if ours is None:
            await asyncio.to_thread(process.wait, END_S)
        else:
            async with asyncio.timeout(END_S):
                await ours.wait()

    async def start_anew(self, name: str) -> None:
        """As it was started before; one that lives still is killed."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes[name].kill()
        recipe = self._recipes[name]
        started = await asyncio.create_subprocess_exec(
            *recipe.command,
            env=recipe.environment,
            cwd=recipe.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=die_with(os.getpid(), signal.SIGTERM),
        )
        self._started.append(started)
        self._processes[name] = _process(name, started.pid)

    async def close(self) -> None:
        """Wake everybody; end what we started."""
        for name in self._processes:
            self._wake(name)
        for started in self._started:
            if started.returncode is None:
                started.terminate()
                await started.wait()

    def _wake(self, name: str) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._processes[name].send_signal(signal.SIGCONT)


def _process(name: str, pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess as error:
        raise ConfigError(f"{name}: there is no process {pid}", param="pid") from error


def _recipe(process: psutil.Process) -> Recipe:
    try:
        return Recipe(
            command=tuple(process.cmdline()),
            environment=process.environ(),
            folder=process.cwd(),
        )
    except psutil.Error as error:
        raise ConfigError(f"pid {process.pid}: {error}", param="pid") from error
