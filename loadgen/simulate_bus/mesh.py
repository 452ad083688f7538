"""The processes of a fleet on this machine, for the length of a block.

    broker       embedded, in a folder that goes with the run
    control-N    admission and router, as ``mesh control``
    crew-N       as many workers as fit, as ``mesh worker --crew``

A process that ends by itself is started again; when it was a crew, the bus hears of the end of each
of its workers at once, as ``mesh up`` tells it of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from infra.bus import Bus, EmbeddedBroker, Msg, ensure_topology
from infra.children import Child, ChildFailed, ChildSpec, describe_exit, stop_in_order
from infra.config import BusConfig
from infra.settings import variable
from infra.task_scope import task_scope
from infra.times import Times
from infra.up_plan import mesh_command
from loadgen.simulate_bus.model import write_model
from loadgen.simulate_bus.policy import control_flags
from loadgen.simulate_bus.settings import MODEL, BusRun
from schemas import subjects
from schemas.codec import decode, encode
from schemas.control import Beat
from schemas.errors import BusUnavailable, SchemaError
from workers.crew.figures import WorkerFigures, read_figures
from workers.crew.plan import write_crew

_START_S = 30.0  # and as long again for every 50 workers
_STOP_S = 20.0
_POLL_S = 0.05


class FleetMesh:
    """A fleet that is ready."""

    def __init__(self, run: BusRun, folder: Path, broker: EmbeddedBroker, bus: Bus) -> None:
        self._ended: list[str] = []
        self._warned: Counter[str] = Counter()
        self._run = run
        self._folder = folder
        self._broker = broker
        self._bus = bus
        self._beats: dict[str, Beat] = {}  # by process id
        self._children: list[Child] = []
        self._failed: ChildFailed | None = None
        self._ready_once: set[str] = set()  # children that beat

    @property
    def client_url(self) -> str:
        """Of the broker, for clients."""
        return self._broker.url("client")

    @property
    def times(self) -> Times:
        """The mesh's."""
        return self._bus.times

    @property
    def pids(self) -> dict[str, list[int]]:
        """The running processes, by what they do."""
        found: dict[str, list[int]] = {"broker": [self._broker.pid]}
        for child in self._children:
            if child.pid is not None:
                kind = "workers" if child.spec.kind == "worker" else child.spec.kind
                found.setdefault(kind, []).append(child.pid)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened that should not: ends of processes, and what was warned of how often."""
        warned = (f"{count} x {what}" for what, count in sorted(self._warned.items()))
        return (*self._ended, *warned)

    @property
    def num_ready(self) -> int:
        """Workers that say so."""
        return sum(beat.state == "ready" and bool(beat.worker) for beat in self._beats.values())

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start everything; returns when each worker is ready.

        Raises:
            ChildFailed: a process can't start.
        """
        await self._bus.subscribe(subjects.ALL_BEATS, self._hear)
        model = self._folder / "model"
        write_model(model, self._run.context_length)
        specs = [self._control(number, model) for number in range(1, self._run.plan.routers + 1)]
        specs += [self._crew(number, model) for number in range(1, len(self._run.crews) + 1)]
        for spec in specs:
            child = Child(spec, self._folder / "logs", say=self._say, on_death=self._on_death)
            self._children.append(child)
            tasks.create_task(child.run(), name=spec.name)
        await self._until_ready()

    async def stop(self) -> None:
        """Workers first, then control; SIGKILL for what is left after a while."""
        stages = [[c for c in self._children if c.spec.kind == kind]
                  for kind in ("worker", "control")]  # fmt: skip
        await stop_in_order(stages, time.monotonic() + _STOP_S)

    def _figures(self) -> dict[str, WorkerFigures]:
        """What each worker has done by now, by name, as far as its process has noted it."""
        found = {}
        for number in range(1, len(self._run.crews) + 1):
            crew = read_figures(self._figures_file(number))
            for one in crew.workers if crew else ():
                found[one.name] = one
        return found

    async def figures_now(self) -> dict[str, WorkerFigures]:
        """The same as it is at this moment; of a process that does not answer, as it was."""
        moment_s = time.monotonic()
        for child in self._children:
            beat = self._beats.get(child.process_id)
            if child.spec.kind == "worker" and beat is not None and beat.state == "ready":
                child.send(signal.SIGUSR1)
        numbers = range(1, len(self._run.crews) + 1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                for number in numbers:
                    await self._until_noted(number, moment_s)
        return self._figures()

    async def _until_noted(self, number: int, moment_s: float) -> None:
        while True:
            crew = read_figures(self._figures_file(number))
            if crew is not None and crew.monotonic_s >= moment_s:
                return
            await asyncio.sleep(_POLL_S)

    # -- children ------------------------------------------------------------------------------

    def _control(self, number: int, model: Path) -> ChildSpec:
        run = self._run
        decided = control_flags(run.plan, self._folder, run.options.speed)
        flags = ("--model", f"{MODEL}={model}", *decided)
        return self._spec("control", f"control-{number}", *flags)

    def _crew(self, number: int, model: Path) -> ChildSpec:
        crew = self._folder / f"crew-{number}.json"
        write_crew(self._run.crews[number - 1], crew)
        return self._spec(
            "worker", f"crew-{number}", "--model", f"{MODEL}={model}", "--engine", "simulated",
            "--speed", str(self._run.options.speed), "--block-size", str(self._run.plan.block_size),
            "--crew", str(crew), "--crew-figures", str(self._figures_file(number)),
            "--kv-transports", "shm", "--threads", "1",
        )  # fmt: skip

    def _figures_file(self, number: int) -> Path:
        return self._folder / f"figures-{number}.json"

    def _spec(self, kind: str, name: str, *flags: str) -> ChildSpec:
        where = ("--data", str(self._folder), "--time-scale", str(self._run.time_scale))
        return ChildSpec(
            kind=kind,
            name=name,
            command=(*mesh_command(), kind, "--name", name, *where, *flags),
            env={variable(BusConfig.table, "nats_url"): self._broker.url(kind)},
        )

    def _say(self, line: str) -> None:
        """A line of a child's stderr: ``name | level: event facts``, of warnings and worse."""
        name, _, words = line.partition(" | ")
        level, _, event = words.partition(": ")
        if level in ("warning", "error", "critical") and event:
            self._warned[f"{name}: {level}: {event.split()[0]}"] += 1

    async def _on_death(self, child: Child, code: int) -> bool:
        self._ended.append(f"{child.spec.name} {describe_exit(code)}")
        if child.process_id not in self._beats:  # it never was there
            words = child.last_words
            if not words.startswith("mesh "):
                words = "it crashed; --logs keeps its log"
            self._failed = ChildFailed(f"{child.spec.name} can't start: {words}")
            return False
        pid = self._beats[child.process_id].pid
        for beat in [beat for beat in self._beats.values() if beat.pid == pid]:
            gone = msgspec.structs.replace(beat, state="gone")
            self._beats.pop(beat.process, None)
            with contextlib.suppress(BusUnavailable):  # then three missed beats say it
                await self._bus.publish(subjects.beat(gone.process), encode(gone))
        return True

    # -- life ----------------------------------------------------------------------------------

    def _hear(self, message: Msg) -> None:
        with contextlib.suppress(SchemaError):
            beat = decode(message.data, Beat)
            if beat.state == "gone":
                self._beats.pop(beat.process, None)
            else:
                self._beats[beat.process] = beat

    async def _until_ready(self) -> None:
        num_workers = len(self._run.workers)
        limit_s = _START_S * (1 + num_workers / 50)
        try:
            async with asyncio.timeout(limit_s):
                while not self._is_whole():
                    if self._failed is not None:
                        raise self._failed
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ChildFailed(
                f"{self.num_ready} of {num_workers} workers were ready within {limit_s:.0f} s"
            ) from None

    def _is_whole(self) -> bool:
        states = Counter(beat.kind for beat in self._beats.values() if beat.state == "ready")
        enough = states["control"] >= self._run.plan.routers
        return enough and self.num_ready >= len(self._run.workers)


@asynccontextmanager
async def fleet_mesh(run: BusRun, folder: Path) -> AsyncGenerator[FleetMesh, None]:
    """The fleet of ``run``, ready when the block begins. Logs are in ``folder``/logs.

    Raises:
        ChildFailed: a process can't start, or not all workers were ready in time.
        ConfigError: the broker can't be started there.
    """
    async with EmbeddedBroker(folder) as broker:
        times = Times().scaled(run.time_scale)
        url = broker.url("control")
        async with await Bus.connect(url, role="control", name="simulate", times=times) as bus:
            await ensure_topology(bus)
            async with task_scope() as tasks:
                mesh = FleetMesh(run, folder, broker, bus)
                try:
                    await mesh.start(tasks)
                    yield mesh
                finally:
                    await mesh.stop()
