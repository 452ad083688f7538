"""A mesh of our own: ``mesh up``, and beside it what that starts only one of.

The second bridge is a child of this process, watched and started again as ``mesh up`` does with
its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.children import Child, ChildSpec
from infra.config import BusConfig
from infra.http_server import bind
from infra.settings import variable
from infra.task_scope import task_scope
from infra.up_plan import mesh_command
from loadgen.bench.own_mesh import own_mesh

_HOST = "127.0.0.1"
_STOP_S = 15.0
# Points of faults are parts of a handover, so nothing stays at a decode worker, where there is none
# and no claim as "decode". Unless the environment says otherwise.
_SUFFIX = "MESH_CONTROL_ROUTE_SUFFIX_TOKENS"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSettings:
    """What to start.

    ``model`` is NAME=SOURCE; ``speed`` divides the simulated engine's times; ``kv_transports`` is
    the workers' setting of that name.
    """

    engine: str
    model: str
    time_scale: float
    speed: float
    num_prefill: int = 2
    num_decode: int = 2
    num_bridges: int = 2
    num_controls: int = 2
    kv_transports: str = "auto"
    folder: Path

    def worker_flags(self) -> list[str]:
        """Of each worker."""
        flags = ["--engine", self.engine, "--threads", "1", "--kv-transports", self.kv_transports]
        if self.engine == "torch":
            return [*flags, "--dtype", "fp32", "--kv-memory", "128MiB"]
        return [*flags, "--speed", str(self.speed)]

    def up_flags(self) -> list[str]:
        """Of ``mesh up``."""
        return [
            "--prefill", str(self.num_prefill), "--decode", str(self.num_decode),
            "--controls", str(self.num_controls), "--model", self.model,
            "--time-scale", str(self.time_scale), *self.worker_flags(),
        ]  # fmt: skip


class Starter:
    """Starts more processes of the mesh; they end with it."""

    def __init__(self, settings: OwnSettings, tasks: asyncio.TaskGroup) -> None:
        self.settings = settings
        self._tasks = tasks
        self._children: list[Child] = []

    def start(
        self, kind: str, name: str, *flags: str, command: Sequence[str] | None = None
    ) -> Child:
        """One process of ``kind``, started again whenever it ends by itself."""
        folder = self.settings.folder
        where = ["--data", str(folder), "--time-scale", str(self.settings.time_scale)]
        url = BusConfig(data=folder).url(kind)
        spec = ChildSpec(
            kind=kind,
            name=name,
            command=(*(command or mesh_command()), kind, "--name", name, *where, *flags),
            env={variable(BusConfig.table, "nats_url"): url},
        )
        child = Child(spec, folder / "logs", say=lambda line: None, on_death=_start_again)
        self._children.append(child)
        self._tasks.create_task(child.run(), name=name)
        return child

    def start_worker_with_jumping_clock(self) -> Child:
        """A decode worker whose wall clock jumps at SIGUSR1."""
        program = (sys.executable, "-P", "-m", "loadgen.chaos.jumping_clock")
        flags = ("--role", "decode", "--model", self.settings.model)
        return self.start(
            "worker", "decode-clock", *flags, *self.settings.worker_flags(), command=program
        )

    @property
    def kv_disk(self) -> Path:
        """Where workers with a disk keep their blocks."""
        return self.settings.folder / "kv-disk"

    def start_worker_with_disk(self) -> Child:
        """A worker of both roles that keeps blocks over restarts."""
        return self._start_with_disk(None)

    def start_worker_with_bad_disk(self, kind: str) -> Child:
        """The same, with a disk that goes bad at SIGUSR1; see ``loadgen.chaos.bad_disk``."""
        return self._start_with_disk((sys.executable, "-P", "-m", "loadgen.chaos.bad_disk", kind))

    def _start_with_disk(self, command: Sequence[str] | None) -> Child:
        flags = ("--role", "both", "--model", self.settings.model, "--kv-disk")
        return self.start(
            "worker",
            "both-disk",
            *flags,
            str(self.kv_disk),
            *self.settings.worker_flags(),
            command=command,
        )

    async def stop(self) -> None:
        """End them all, and wait."""
        deadline_s = asyncio.get_running_loop().time() + _STOP_S
        for child in self._children:
            child.stop()
        for child in self._children:
            await child.ended(deadline_s)


async def _start_again(child: Child, code: int) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A mesh that is starting: ``mesh up`` is ready, the others may not be yet."""

    client_nats_url: str
    control_nats_url: str
    bridges: tuple[str, ...]
    starter: Starter
    supervisor_pid: int


@asynccontextmanager
async def own_chaos_mesh(settings: OwnSettings) -> AsyncGenerator[Own, None]:
    """The mesh, for the length of the block. Its logs are in ``settings.folder``.

    Raises:
        MeshNotStarted: ``mesh up`` did not become ready.
    """
    env = {_SUFFIX: os.environ.get(_SUFFIX, "0")}
    async with (
        own_mesh(settings.up_flags(), env, data=settings.folder) as up,
        task_scope() as tasks,
    ):
        starter = Starter(settings, tasks)
        bridges = [up.url]
        for number in range(2, settings.num_bridges + 1):
            port = _free_port()
            starter.start("bridge", f"bridge-{number}", "--port", str(port), "--host", _HOST)
            bridges.append(f"http://{_HOST}:{port}")
        try:
            yield Own(
                client_nats_url=up.nats_url,
                control_nats_url=up.control_nats_url,
                bridges=tuple(bridges),
                starter=starter,
                supervisor_pid=up.pid,
            )
        finally:
            await starter.stop()


def _free_port() -> int:
    """A port that was free a moment ago; the bridge takes it again when it is started again."""
    bound = bind(_HOST, 0, key="chaos.port")
    port: int = bound.getsockname()[1]
    bound.close()
    return port
