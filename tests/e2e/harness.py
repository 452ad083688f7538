"""A mesh of real processes for tests: a real broker, roles started as a user would start them.

Every process is started by ``mesh <role> …``; it can be killed, frozen and woken by name. At the
end of a test nothing of it is left: processes, leases, blocks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from infra.bus import DEAD, Bus, EmbeddedBroker, Msg, StoredMessage
from infra.times import Times
from pipeline.client import MeshClient, new_request_id
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat
from schemas.requests import InferenceRequest, SamplingParams
from schemas.tokens import TokenDelta, Usage
from tests.freezing import freeze

MESH = Path(sys.executable).parent / "mesh"
ROOT = Path(__file__).parents[2]
MODEL = "tiny"
READY_S = 240.0  # five processes that import torch, on two busy cores


class Broker(Protocol):
    """One server, or a cluster."""

    def url(self, user: str) -> str: ...


@dataclass(slots=True)
class Role:
    """A process of the mesh."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def send(self, number: signal.Signals) -> None:
        """A frozen one stands still when this returns."""
        if number == signal.SIGSTOP:
            freeze(self.process.pid)
        else:
            self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait(10)


@dataclass(slots=True)
class Mesh:
    """The processes of one test, and a connection that watches them."""

    folder: Path
    broker: Broker
    bus: Bus
    time_scale: float
    model: str = MODEL
    simulated_flags: tuple[str, ...] = ()  # of start_worker, for one more like those that run
    roles: dict[str, Role] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)  # by pid
    workers: dict[str, Beat] = field(default_factory=dict)  # by process id

    async def start(self, kind: str, name: str, *flags: str) -> Role:
        """Start ``mesh <kind>`` under ``name``; returns at once."""
        return await self.start_command(kind, name, [str(MESH), kind, "--name", name, *flags])

    async def start_command(self, kind: str, name: str, command: list[str]) -> Role:
        """Start any program that plays a role of ``kind``."""
        log = self.folder / f"{name}.log"
        environment = {
            **os.environ,
            "MESH_NATS_URL": self.broker.url(kind),
            "MESH_DATA": str(self.folder),
            "MESH_TIME_SCALE": str(self.time_scale),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": str(ROOT),
        }
        with log.open("ab") as out:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                command,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.roles[name] = Role(name, process, log)
        return self.roles[name]

    async def start_worker(self, name: str, role: str, model: Path | str, *flags: str) -> Role:
        model_flag = ("--model", f"{self.model}={model}")
        return await self.start("worker", name, "--role", role, *model_flag, *flags)

    async def until_ready(self, *names: str, timeout_s: float = READY_S) -> None:
        """Wait until each of ``names`` (all, when none is given) says so in a heartbeat."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        for name in names or tuple(self.roles):
            role = self.roles[name]
            while (state := self.state(name)) != "ready":
                if role.process.poll() is not None or loop.time() > ends:
                    raise AssertionError(f"{name} is {state}: {role.log.read_text()[-3000:]}")
                await asyncio.sleep(0.02)

    def check_alive(self) -> None:
        """Fail when a process has ended by itself."""
        for role in self.roles.values():
            if role.process.poll() is not None:
                raise AssertionError(f"{role.name} ended: {role.log.read_text()[-3000:]}")

    def state(self, name: str) -> str:
        beat = self.beats.get(self.roles[name].process.pid)
        return beat.state if beat else "silent"

    def hear(self, message: Msg) -> None:
        beat = decode(message.data, Beat)
        self.beats[beat.pid] = beat
        self.workers[beat.process] = beat

    @property
    def num_ready_workers(self) -> int:
        return sum(beat.state == "ready" and bool(beat.worker) for beat in self.workers.values())

    def beat_of(self, name: str) -> Beat:
        return self.beats[self.roles[name].process.pid]

    async def bridge_port(self, name: str, timeout_s: float = 60.0) -> int:
        """The port on which a bridge listens, from its log."""
        async with asyncio.timeout(timeout_s):
            while True:
                for line in self.roles[name].log.read_text().splitlines():
                    if '"bridge_listening"' in line:
                        return int(json.loads(line)["port"])
                await asyncio.sleep(0.05)

    async def next_dead_letter(self, after_seq: int, timeout_s: float = 60.0) -> StoredMessage:
        """The first dead letter behind ``after_seq`` that is the last one by now."""
        async with asyncio.timeout(timeout_s):
            while True:
                last = await self.bus.last_message(DEAD, subjects.DEAD)
                if last is not None and last.seq > after_seq:
                    return last
                await asyncio.sleep(0.01)

    def name_of_worker(self, worker: str) -> str:
        """The name under which the owner of a worker id was started."""
        return next(n for n in self.roles if worker.startswith(n + "-"))

    async def until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no live worker holds a block or a sequence: nothing leaked."""
        async with asyncio.timeout(timeout_s):
            while busy := self._busy():
                await asyncio.sleep(0.05)
        assert not busy

    def _busy(self) -> list[str]:
        workers = [beat for beat in self.beats.values() if beat.worker and self._lives(beat.pid)]
        return [
            beat.worker
            for beat in workers
            if beat.load.num_running or beat.load.num_waiting
            or beat.load.num_free_blocks != beat.load.num_blocks
        ]  # fmt: skip

    def _lives(self, pid: int) -> bool:
        return any(
            role.process.pid == pid and role.process.poll() is None for role in self.roles.values()
        )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[MeshClient]:
        async with MeshClient.connect(self.broker.url("client"), times=self.bus.times) as client:
            yield client

    def request(
        self,
        prompt: str | tuple[int, ...],
        *,
        cache_salt: str = "",
        model: str = "",
        **sampling: object,
    ) -> InferenceRequest:
        return InferenceRequest(
            request_id=new_request_id(),
            model=model or self.model,
            prompt=prompt,
            cache_salt=cache_salt,
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        )

    def stop(self) -> None:
        """End every process: politely, then not."""
        for role in self.roles.values():
            if role.process.poll() is None:
                role.send(signal.SIGCONT)
                role.send(signal.SIGTERM)
        for role in self.roles.values():
            try:
                role.process.wait(10)
            except subprocess.TimeoutExpired:
                role.kill()


@asynccontextmanager
async def mesh_of(folder: Path, *, time_scale: float = 0.5) -> AsyncIterator[Mesh]:
    """A broker and nothing else yet."""
    async with EmbeddedBroker(folder / "broker", clients=("client", "alice")) as broker:
        async with mesh_on(broker, folder, time_scale=time_scale) as mesh:
            yield mesh


@asynccontextmanager
async def mesh_on(broker: Broker, folder: Path, *, time_scale: float = 0.5) -> AsyncIterator[Mesh]:
    """A mesh without processes on a broker that runs."""
    times = Times().scaled(time_scale)
    async with await Bus.connect(broker.url("control"), role="control", times=times) as bus:
        mesh = Mesh(folder, broker, bus, time_scale)
        await bus.subscribe(subjects.ALL_BEATS, mesh.hear)
        try:
            yield mesh
        finally:
            mesh.stop()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client read: token ids and text per choice."""

    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    deltas: tuple[TokenDelta, ...]
    usage: Usage


async def ask(client: MeshClient, request: InferenceRequest, timeout_s: float = 60.0) -> Answer:
    """Submit, read to the end, check numbers and usage."""
    num_choices = request.sampling.n
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    texts = [""] * num_choices
    deltas = []
    async with asyncio.timeout(timeout_s):
        stream = await client.submit(request)
        async for delta in stream:
            assert delta.number == len(ids[delta.index]), "a number is missing or comes twice"
            ids[delta.index] += delta.ids
            texts[delta.index] += delta.text
            deltas.append(delta)
    assert stream.end is not None
    assert stream.end.num_tokens == tuple(len(run) for run in ids)
    assert stream.end.usage.completion_tokens == sum(len(run) for run in ids)
    return Answer(tuple(tuple(run) for run in ids), tuple(texts), tuple(deltas), stream.end.usage)
