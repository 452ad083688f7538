"""``mesh drain``: an order on the bus that a process follows as it does a SIGTERM."""

from __future__ import annotations

import asyncio
import signal

import pytest
from typer.testing import CliRunner

from infra.bus import Bus, EmbeddedBroker
from infra.cli import app
from infra.drain import Drainer
from infra.task_scope import task_scope
from schemas import subjects
from schemas.codec import encode
from schemas.control import Beat, Drain, Load
from schemas.errors import DeadlineExceeded, EngineFailed, InvalidRequest
from tests.conftest import Until
from tests.infra.test_process import Role, role

__all__ = ["role"]


@pytest.mark.parametrize("by", ["name", "process"])
async def test_a_process_drains_by_order(role: Role, bus: Bus, until: Until, by: str) -> None:
    """As by SIGTERM: draining, gone, exit code 0. Said again, it hurries nobody."""
    role.start("stay")
    await until(lambda: "ready" in role.states, 10)
    process = role.beats[-1].process
    lines: list[str] = []
    name = {"name": "bridge", "process": process}[by]
    last = await Drainer(bus, lines.append).drain(name, stay_down=False, timeout_s=10)
    assert (last.state, last.process) == ("gone", process)
    assert await role.ended(until) == 0
    assert role.states == ["starting", "ready", "draining", "gone"]
    assert lines[-1] == f"{process} is gone"
    assert "order" in role.output()[0]


async def test_only_its_own_order_counts(role: Role, bus: Bus, until: Until) -> None:
    """One for a process before it, or none of ours, is passed over."""
    role.start("stay")
    await until(lambda: "ready" in role.states, 10)
    subject = subjects.control(role.beats[-1].process)
    await bus.publish(subject, encode(Drain(process="bridge-bridge-before")))
    await bus.publish(subject, b"\xc1")
    num_beats = len(role.beats)
    await until(lambda: len(role.beats) > num_beats + 2)
    assert role.states == ["starting", "ready"]


async def test_a_drain_that_takes_too_long_is_said(role: Role, bus: Bus, until: Until) -> None:
    """It goes on draining; one that is killed then is no orderly end."""
    role.start("linger", grace_s=30)
    await until(lambda: "ready" in role.states, 10)
    drainer, process = Drainer(bus, print), role.beats[-1].process
    with pytest.raises(DeadlineExceeded):
        await drainer.drain(process, stay_down=False, timeout_s=0.5)
    assert role.states[-1] == "draining"
    async with asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(_failure(drainer, process))
        await until(lambda: role.states[-1] == "draining")
        role.signal(signal.SIGKILL)
    assert isinstance(draining.result(), EngineFailed)


async def _failure(drainer: Drainer, name: str) -> Exception | None:
    try:
        await drainer.drain(name, stay_down=False, timeout_s=20)
    except EngineFailed as error:
        return error
    return None


async def test_who_is_meant_must_be_clear(bus: Bus) -> None:
    """An unknown name lists whom there is; one that two have lists both. What a worker still has
    is shown."""
    beats = [
        Beat(process=f"worker-w-{nonce}", kind="worker", state="ready", host="h", pid=1,
             started_unix_ms=1, worker=f"w-id-{nonce}", load=Load(num_running=3, num_blocks=8))
        for nonce in ("1", "2")
    ]  # fmt: skip
    lines: list[str] = []
    drainer = Drainer(bus, lines.append)
    async with task_scope() as tasks:
        tasks.create_task(_repeat(bus, *beats))
        with pytest.raises(InvalidRequest, match=r"'nobody'.*worker-w-1, worker-w-2"):
            await drainer.drain("nobody", stay_down=False, timeout_s=5)
        with pytest.raises(InvalidRequest, match="may be worker-w-1, worker-w-2"):
            await drainer.drain("w", stay_down=False, timeout_s=5)
        with pytest.raises(DeadlineExceeded):
            await drainer.drain("w-id-2", stay_down=False, timeout_s=0.2)
    assert lines == ["worker-w-2 is asked to drain: 3 running, 0 waiting, 8 blocks held"]


async def _repeat(bus: Bus, *beats: Beat) -> None:
    while True:
        for beat in beats:
            await bus.publish(subjects.beat(beat.process), encode(beat))
        await asyncio.sleep(0.05)


async def test_the_command_ends_when_the_process_is_gone(
    role: Role, broker: EmbeddedBroker, until: Until
) -> None:
    """Exit code 0, progress on stderr; asked again, nobody is called so: 2."""
    role.start("stay")
    await until(lambda: "ready" in role.states, 10)
    env = {"MESH_NATS_URL": broker.url("control"), "MESH_TIME_SCALE": "0.5"}
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["drain", "bridge"], env=env)
    assert ended.exit_code == 0, ended.output
    assert "is gone" in ended.stderr
    again = await asyncio.to_thread(CliRunner().invoke, app, ["drain", "bridge"], env=env)
    assert again.exit_code == 2
    assert "no process or worker is called 'bridge'" in again.stderr
