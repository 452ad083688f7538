"""``mesh up`` with roles that only say that they are ready: start, restart, stop, nothing left.

Real supervisor, broker and children; see ``small_mesh.py``.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from infra.bus import Bus, Msg
from infra.config import read_bus_env
from infra.data_lock import data_lock
from infra.drain import Drainer
from schemas import subjects
from schemas.codec import decode
from schemas.control import Beat
from tests.freezing import freeze

SCRIPT = Path(__file__).with_name("small_mesh.py")
T = TypeVar("T")
START_S = 30.0  # a busy machine; 2.5 s on an idle one


class Mesh:
    """One run of ``small_mesh.py up``, and what it says."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self, *flags: str, ignores: signal.Signals | None = None) -> None:
        before = partial(signal.signal, ignores, signal.SIG_IGN) if ignores else None
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "up", "--data", str(self.data), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # pytest's own Ctrl-C must not stop it first
            preexec_fn=before,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """The first line that matches, now or later."""
        return eventually(
            lambda: next((m for line in self.lines if (m := re.search(pattern, line))), None),
            lambda: f"{pattern!r} in\n" + "\n".join(self.lines),
            timeout_s,
        )

    def start_ready(
        self, *flags: str, ignores: signal.Signals | None = None
    ) -> list[psutil.Process]:
        """Start, wait until it is ready; all its processes below the supervisor."""
        flags = flags or ("--port", "0", "--both", "1", "--model", "m=good")
        self.start(*flags, ignores=ignores)
        self.wait_for("ready after")
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def pid_of(self, name: str) -> int:
        """From the newest line that says it is ready."""
        found = [re.match(rf"{name} +ready.*pid (\d+)", line) for line in self.lines]
        return int([match for match in found if match][-1].group(1))

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self, timeout_s: float = 60.0) -> int:
        """Its exit code; everything it said is in ``lines``."""
        assert self.process is not None
        assert self._reader is not None
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def eventually(look: Callable[[], T | None], what: Callable[[], str], timeout_s: float = 60.0) -> T:
    """What ``look`` returns once that is true."""
    ends = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < ends, f"waited in vain for {what()}"
        time.sleep(0.02)
    return found


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    made = Mesh(tmp_path / "data")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
        made.ended()


def all_gone(processes: list[psutil.Process]) -> bool:
    """None of them runs any more."""
    return all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in processes)


def processes_of(mesh: Mesh) -> list[psutil.Process]:
    """Whoever runs in the mesh's data directory, as its command line says; the broker as well."""
    return [
        one
        for one in psutil.process_iter(["cmdline", "status"])
        if one.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(mesh.data) in word for word in one.info["cmdline"] or ())
    ]


def assert_nothing_left(mesh: Mesh, processes: list[psutil.Process]) -> None:
    """No process, also none that was not told of, no lock on the data directory, no shared memory.
    (The broker's port may be another's by now.)"""
    eventually(lambda: all_gone(processes), lambda: f"the end of {processes}")
    eventually(lambda: not processes_of(mesh), lambda: f"the end of {processes_of(mesh)}")
    pids = {one.pid for one in processes}
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]
    with data_lock(mesh.data):
        pass


def assert_a_second_is_refused(mesh: Mesh) -> None:
    """One mesh per data directory: the second says who the first is, which goes on."""
    assert mesh.process is not None
    second = Mesh(mesh.data)
    second.start("--port", "0", "--model", "m=good")
    assert second.ended() == 2
    pid = mesh.process.pid
    assert f"another mesh runs in {mesh.data}, pid {pid} (mesh.data)" in second.lines[-1]
    assert mesh.process.poll() is None


def assert_drained_in_order(mesh: Mesh) -> None:
    """Each stage heard SIGTERM when the one before had ended; the broker was there for all."""
    ends = {}
    for name in ("bridge", "prefill-1", "decode-1", "control-1", "control-2"):
        log = mesh.data / "logs" / f"{name}.log"
        assert "process_ended" in log.read_text()
        ends[name] = log.stat().st_mtime_ns
    assert ends["bridge"] < min(ends["prefill-1"], ends["decode-1"])
    assert max(ends["prefill-1"], ends["decode-1"]) < min(ends["control-1"], ends["control-2"])


def test_it_says_what_is_ready_and_how_to_use_it(mesh: Mesh) -> None:
    """Without flags: a prefill and a decode worker. One line per process with its pid, then URL
    and curl line; bus.env is for the owner only, and gone at the end."""
    processes = mesh.start_ready("--port", "0", "--model", "m=good")
    for name in ("broker", "control-1", "control-2", "prefill-1", "decode-1", "bridge"):
        psutil.Process(mesh.pid_of(name))
    assert len(processes) == 6
    base = mesh.wait_for(r"ready after .*: (http://127\.0\.0\.1:\d+)/v1").group(1)
    assert mesh.wait_for(r"^  curl ").string.startswith(f"  curl {base}/v1/chat/completions ")
    assert_a_second_is_refused(mesh)
    env_file = mesh.data / "bus.env"
    assert env_file.stat().st_mode & 0o777 == 0o600
    assert read_bus_env(env_file)["NATS_URL"].startswith("nats://client:")
    mesh.signal(signal.SIGINT)
    assert mesh.ended() == 0
    assert not env_file.exists()
    assert_nothing_left(mesh, processes)
    assert_drained_in_order(mesh)


def test_ctrl_c_twice_kills(mesh: Mesh) -> None:
    """A child that does not drain, here a frozen bridge, holds nobody up for long."""
    processes = mesh.start_ready()
    freeze(mesh.pid_of("both-1"))
    freeze(mesh.pid_of("bridge"))
    mesh.signal(signal.SIGINT)
    mesh.wait_for("stopping")
    started_s = time.monotonic()
    mesh.signal(signal.SIGINT)
    mesh.ended()
    assert time.monotonic() - started_s < 7.5  # the usual grace time is 8 s
    assert_nothing_left(mesh, processes)


def test_a_closed_terminal_ends_it_in_order_unless_that_is_ignored(mesh: Mesh) -> None:
    """SIGHUP is an end like Ctrl-C; under nohup, which has it ignored, it is nothing."""
    flags = ("--port", "0", "--model", "m=good")
    processes = mesh.start_ready(*flags, ignores=signal.SIGHUP)
    mesh.signal(signal.SIGHUP)
    mesh.signal(signal.SIGINT)
    assert mesh.ended() == 0
    assert_nothing_left(mesh, processes)
    assert_drained_in_order(mesh)
    mesh.lines.clear()
    processes = mesh.start_ready()
    mesh.signal(signal.SIGHUP)
    assert mesh.ended() == 0
    assert_nothing_left(mesh, processes)


def test_killing_the_supervisor_leaves_nothing(mesh: Mesh) -> None:
    """SIGKILL: the children notice by themselves, the broker goes with them; a drain that waits
    for what can't come any more, here a worker's, is cut after 2 s."""
    processes = mesh.start_ready("--port", "0", "--both", "1", "--model", "m=lingers")
    mesh.signal(signal.SIGKILL)
    started_s = time.monotonic()
    mesh.ended()
    eventually(lambda: all_gone(processes), lambda: f"the end of {processes}")
    assert time.monotonic() - started_s < 7.5  # the usual grace time is 8 s
    assert_nothing_left(mesh, processes)


def test_killing_the_supervisor_while_it_starts_leaves_nothing(mesh: Mesh) -> None:
    """Also while children are still importing."""
    mesh.start("--port", "0", "--model", "m=good")
    mesh.wait_for("broker .*ready")
    assert mesh.process is not None
    processes = psutil.Process(mesh.process.pid).children(recursive=True)
    mesh.signal(signal.SIGKILL)
    mesh.ended()
    assert_nothing_left(mesh, processes)


async def test_a_dead_child_is_back_and_the_mesh_was_told(mesh: Mesh) -> None:
    """SIGKILL of a worker: its last beat comes again with "gone"; one line says so; it is ready
    again under another id."""
    mesh.start_ready()
    beats: list[Beat] = []

    def hear(message: Msg) -> None:
        beats.append(decode(message.data, Beat))

    url = read_bus_env(mesh.data / "bus.env")["MESH_NATS_URL_CONTROL"]
    async with await Bus.connect(url, role="control") as bus:
        await bus.subscribe(subjects.ALL_BEATS, hear)
        pid = mesh.pid_of("both-1")
        await _until(lambda: any(beat.pid == pid for beat in beats))
        process = next(beat.process for beat in beats if beat.pid == pid)
        os.kill(pid, signal.SIGKILL)
        await _until(lambda: any(b.process == process and b.state == "gone" for b in beats))
        await _until(lambda: any("ready again" in line for line in mesh.lines))
    mesh.wait_for(r"^both-1 was ended by SIGKILL; starting again in 0\.1 s$")
    assert mesh.pid_of("both-1") != pid
    assert process not in {b.process for b in beats if b.pid == mesh.pid_of("both-1")}
    mesh.signal(signal.SIGTERM)
    assert mesh.ended() == 0


@pytest.mark.parametrize("stays", [False, True])
async def test_a_drained_child_comes_back_unless_it_is_to_stay_down(
    mesh: Mesh, stays: bool
) -> None:
    """`mesh drain` restarts a process; with --stay-down it goes, and the mesh is no less ready."""
    mesh.start_ready()
    url = read_bus_env(mesh.data / "bus.env")["MESH_NATS_URL_CONTROL"]
    async with await Bus.connect(url, role="control") as bus:
        await Drainer(bus, print).drain("both-1", stay_down=stays, timeout_s=10)
    if stays:
        mesh.wait_for(r"^both-1 ended with exit code 0; it stays down$")
    else:
        mesh.wait_for(r"^both-1 ended with exit code 0; starting again in 0\.1 s$")
        mesh.wait_for("both-1 .*ready again")
    mesh.signal(signal.SIGTERM)
    assert mesh.ended() == 0
    assert not (stays and any("ready again" in line for line in mesh.lines))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(START_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_dead_broker_is_started_again(mesh: Mesh) -> None:
    """SIGKILL of nats-server: same port, the children come back by themselves."""
    mesh.start_ready()
    port = int(mesh.wait_for(r"broker .*port (\d+)").group(1))
    os.kill(mesh.pid_of("broker"), signal.SIGKILL)
    mesh.wait_for("broker was ended by SIGKILL; starting again")

    def accepts() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    eventually(accepts, lambda: f"a broker on port {port}")
    mesh.signal(signal.SIGINT)
    assert mesh.ended() == 0


def test_a_port_in_use_is_said_before_anything_starts(mesh: Mesh) -> None:
    """Exit code 2, the port and its key; no data directory was made."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        mesh.start("--port", str(port), "--model", "m=good")
        assert mesh.ended() == 2
    assert mesh.lines == [
        f"small_mesh: config_error: port {port} on 127.0.0.1 is in use (bridge.port)"
    ]
    assert not mesh.data.exists()


def test_a_data_directory_that_cannot_be_made_is_said(mesh: Mesh) -> None:
    """Exit code 2 and the path."""
    mesh.data.parent.mkdir(exist_ok=True)
    mesh.data.write_text("a file")
    mesh.start("--port", "0", "--model", "m=good")
    assert mesh.ended() == 2
    assert f"can't use the data directory {mesh.data}" in mesh.lines[-1]


def test_a_child_that_can_not_start_ends_the_mesh(mesh: Mesh) -> None:
    """An error of the model is said once, in the child's words, and not tried for ever."""
    mesh.start("--port", "0", "--model", "m=refused")
    assert mesh.ended(START_S) == 1
    last = mesh.lines[-1]
    assert re.search(r"child_failed: (prefill|decode)-1 can't start: .*no such architecture", last)
    assert not any("starting again" in line for line in mesh.lines)
    assert not (mesh.data / "bus.env").exists()


def test_a_model_that_is_not_there_is_said_before_the_broker_starts(mesh: Mesh) -> None:
    """In the words of `mesh prepare`."""
    mesh.start("--port", "0", "--model", "m=missing")
    assert mesh.ended(START_S) == 1
    assert "child_failed: m=missing: " in mesh.lines[-1]
    assert "missing: no weights" in mesh.lines[-1]
    assert not any("broker" in line for line in mesh.lines)


def test_several_models_have_workers_each(mesh: Mesh) -> None:
    """--both 1 with two models: two workers, named after their models."""
    processes = mesh.start_ready(
        "--port", "0", "--both", "1", "--model", "org/a.b=good", "--model", "c=good"
    )
    assert len(processes) == 6
    mesh.pid_of("org-a-b-both-1")
    mesh.pid_of("c-both-1")
    mesh.signal(signal.SIGINT)
    assert mesh.ended() == 0
