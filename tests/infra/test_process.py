"""A role as a process: beats, health routes, drain, exit codes. Real processes, a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest_asyncio

from infra.bus import Bus, EmbeddedBroker, Msg, ensure_topology
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat

SCRIPT = Path(__file__).with_name("one_role.py")
Until = Callable[..., Awaitable[None]]


class Role:
    """The process, and the beats it sent."""

    def __init__(self, broker: EmbeddedBroker, folder: Path) -> None:
        self.beats: list[Beat] = []
        self.arrivals: list[float] = []
        self._broker = broker
        self._folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, body: str, *, grace_s: float = 5.0, env: dict[str, str] | None = None) -> None:
        url = self._broker.url("bridge")
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), body, url, str(self._folder), str(grace_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def hear(self, message: Msg) -> None:
        self.beats.append(decode(message.data, Beat))
        self.arrivals.append(time.monotonic())

    @property
    def states(self) -> list[str]:
        """Without repeats."""
        found: list[str] = []
        for beat in self.beats:
            if not found or found[-1] != beat.state:
                found.append(beat.state)
        return found

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self, until: Until, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        await until(lambda: self.process is not None and self.process.poll() is not None, timeout_s)
        return int(self.process.returncode)

    def output(self) -> tuple[str, str]:
        assert self.process is not None
        return self.process.communicate(timeout=60)


@pytest_asyncio.fixture
async def role(bus: Bus, broker: EmbeddedBroker, tmp_path: Path) -> AsyncIterator[Role]:
    made = Role(broker, tmp_path)
    await bus.subscribe(subjects.ALL_BEATS, made.hear)
    yield made
    if made.process is not None:
        if made.process.poll() is None:
            made.process.kill()
        made.process.communicate(timeout=60)


async def test_a_process_beats_serves_its_routes_and_drains(role: Role, until: Until) -> None:
    """starting, ready, draining, gone; /ready answers at the port in the beat; exit code 0."""
    role.start("stay")
    await until(lambda: "ready" in role.states, 10)
    beat = role.beats[-1]
    assert role.process is not None
    assert beat.pid == role.process.pid
    assert beat.process.startswith("bridge-bridge-")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{beat.health_port}") as client:
        assert (await client.get("/ready")).status_code == 200
        assert "process_resident_memory_bytes" in (await client.get("/metrics")).text
    role.signal(signal.SIGTERM)
    assert await role.ended(until) == 0
    await until(lambda: role.states[-1] == "gone")
    assert role.states == ["starting", "ready", "draining", "gone"]
    stdout, stderr = role.output()
    lines = [json.loads(line) for line in stdout.splitlines()]
    assert [line["event"] for line in lines if line["level"] != "warning"] == [
        "drain_started",
        "process_ended",
    ]
    assert {line["process"] for line in lines} == {beat.process}
    assert stderr == ""


async def test_a_process_without_its_broker_is_not_ready(
    role: Role, broker: EmbeddedBroker, until: Until
) -> None:
    """/ready says what is missing, although no beat can; it is ready again with the broker."""
    role.start("stay")
    await until(lambda: "ready" in role.states, 10)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{role.beats[-1].health_port}") as http:

        async def is_ready() -> bool:
            answer = await http.get("/ready")
            assert answer.json()["failing"] == (
                {} if answer.status_code == 200 else {"bus": "broker not reachable"}
            )
            return answer.status_code == 200

        await broker.kill()
        async with asyncio.timeout(60):
            while await is_ready():
                await asyncio.sleep(0.02)
            assert (await http.get("/health")).status_code == 200
            await broker.restart()
            while not await is_ready():
                await asyncio.sleep(0.02)


async def test_beats_come_as_often_as_the_times_say(role: Role, until: Until) -> None:
    """At half of the usual times: every 0.25 s, from a process that does nothing else."""
    role.start("stay")
    await until(lambda: role.states and role.states[-1] == "ready", 10)
    first = len(role.beats)
    await until(lambda: len(role.beats) >= first + 8)
    steady = role.arrivals[first - 1 : first + 8]
    mean_s = (steady[-1] - steady[0]) / (len(steady) - 1)
    assert 0.2 < mean_s < 0.4


async def test_a_drain_that_takes_too_long_is_cut(role: Role, until: Until) -> None:
    """When the grace time is over the body is cancelled; it still says that it is gone."""
    role.start("linger", grace_s=0.3)
    await until(lambda: "ready" in role.states, 10)
    role.signal(signal.SIGTERM)
    assert await role.ended(until) == 1
    await until(lambda: role.states[-1] == "gone")
    assert '"reason":"grace time over"' in role.output()[0]


async def test_a_second_signal_cuts_the_drain(role: Role, until: Until) -> None:
    """Also of the other kind; long before the grace time."""
    role.start("linger", grace_s=60.0)
    await until(lambda: "ready" in role.states, 10)
    role.signal(signal.SIGTERM)
    await until(lambda: "draining" in role.states)
    role.signal(signal.SIGINT)
    assert await role.ended(until) == 1
    assert '"reason":"second SIGINT"' in role.output()[0]


async def test_a_process_whose_loop_is_stuck_ends_all_the_same(role: Role, until: Until) -> None:
    """The kernel's alarm ends it one second after the grace time."""
    role.start("block", grace_s=0.3)
    await until(lambda: "ready" in role.states, 10)
    role.signal(signal.SIGTERM)
    assert await role.ended(until) == -signal.SIGALRM


async def test_an_error_of_ours_is_one_line_and_an_exit_code(role: Role, until: Until) -> None:
    """Code, message and key on stderr; no traceback; the mesh hears that it is gone."""
    role.start("refuse")
    assert await role.ended(until) == 1
    stdout, stderr = role.output()
    assert stderr == "mesh bridge: model_unsupported: no such architecture (model)\n"
    assert "Traceback" not in stdout
    await until(lambda: role.states and role.states[-1] == "gone")


async def test_a_bug_keeps_its_traceback(role: Role, until: Until) -> None:
    """A helper that raises ends the process; the log line and stderr both say where."""
    role.start("crash")
    assert await role.ended(until) == 1
    stdout, stderr = role.output()
    assert "process_crashed" in stdout
    assert "ZeroDivisionError" in stdout
    assert "ZeroDivisionError" in stderr


async def test_helpers_end_with_the_body(role: Role, until: Until) -> None:
    """What the body left running does not hold up the drain."""
    role.start("help_for_ever", grace_s=60.0)
    await until(lambda: "ready" in role.states, 10)
    role.signal(signal.SIGTERM)
    assert await role.ended(until) == 0


async def test_the_process_outlives_its_broker(
    role: Role, broker: EmbeddedBroker, until: Until
) -> None:
    """Broker killed and started again: not ready in between, ready again, same process."""
    role.start("stay")
    await until(lambda: "ready" in role.states, 10)
    beat = role.beats[-1]
    await broker.kill()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{beat.health_port}") as client:

        async def answer() -> dict[str, str]:
            failing: dict[str, str] = (await client.get("/ready")).json()["failing"]
            return failing

        while "bus" not in await answer():
            assert role.process is not None
            assert role.process.poll() is None
        await broker.restart()
        before = len(role.beats)
        await until(lambda: len(role.beats) > before and role.states[-1] == "ready", 10)
        assert await answer() == {}
        metrics = (await client.get("/metrics")).text
    assert "mesh_bus_reconnects_total 1.0" in metrics
    assert role.beats[-1].process == beat.process
    role.signal(signal.SIGTERM)
    assert await role.ended(until) == 0


async def test_without_streams_a_process_waits_and_says_so(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Bus]], tmp_path: Path, until: Until
) -> None:
    """Only control makes the streams; a bridge started first is not ready, and says why."""
    control = await connect("control")
    role = Role(broker, tmp_path)
    await control.subscribe(subjects.ALL_BEATS, role.hear)
    role.start("stay")
    try:
        await until(lambda: any("a control process makes them" in b.reason for b in role.beats), 10)
        assert role.states == ["starting"]
        await ensure_topology(control)
        await until(lambda: "ready" in role.states)
    finally:
        role.signal(signal.SIGKILL)
        role.output()


async def test_a_child_whose_supervisor_is_gone_does_not_start(role: Role, until: Until) -> None:
    """The supervisor died before the child could ask the kernel to be told."""
    role.start("stay", env={"MESH_SUPERVISOR_PID": "1"})
    assert await role.ended(until) == 1
    assert "the supervisor (pid 1) is gone" in role.output()[1]
    assert role.beats == []


async def test_a_child_uses_the_nonce_of_its_supervisor(role: Role, until: Until) -> None:
    """So the supervisor knows the process id before the first beat."""
    role.start("stay", env={"MESH_PROCESS_NONCE": "0badcafe"})
    await until(lambda: role.beats, 10)
    assert role.beats[0].process == "bridge-bridge-0badcafe"
