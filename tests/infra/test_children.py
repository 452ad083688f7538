"""Child processes: kept alive, stopped in order, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from infra.children import Child, ChildSpec, describe_exit, stop_in_order
from infra.task_scope import task_scope
from schemas.errors import ConfigError

Until = Callable[..., Awaitable[None]]

STAYS = "import signal; signal.sigwait([signal.SIGUSR1])"
IGNORES_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
SAYS_AND_DIES = "import sys; print('to the log'); sys.exit('to the console')"


@dataclass
class Watch:
    """Hears what a child's owner would."""

    again: bool = True
    lines: list[str] = field(default_factory=list)
    deaths: list[tuple[str, int]] = field(default_factory=list)

    async def on_death(self, child: Child, code: int) -> bool:
        self.deaths.append((child.process_id, code))
        return self.again

    def child(self, folder: Path, code: str, name: str = "w-1") -> Child:
        spec = ChildSpec(kind="worker", name=name, command=(sys.executable, "-c", code))
        return Child(spec, folder, say=self.lines.append, on_death=self.on_death)


async def test_a_killed_child_is_started_again_under_a_new_id(tmp_path: Path, until: Until) -> None:
    """SIGKILL: reported with its process id and signal, said, and back with another id and pid."""
    watch = Watch()
    child = watch.child(tmp_path, STAYS)
    async with task_scope() as tasks:
        tasks.create_task(child.run())
        await until(lambda: child.pid)
        pid, first = child.pid, child.process_id
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: child.pid not in (None, pid))
        assert watch.deaths == [(first, -signal.SIGKILL)]
        assert child.process_id != first
        assert child.process_id.startswith("worker-w-1-")
        assert watch.lines == ["w-1 was ended by SIGKILL; starting again in 0.1 s"]
    assert child.pid is None


async def test_a_child_whose_owner_says_no_is_not_started_again(tmp_path: Path) -> None:
    """``run`` ends; what the child said last is kept, its stdout is in the log."""
    watch = Watch(again=False)
    child = watch.child(tmp_path, SAYS_AND_DIES)
    await child.run()
    assert [code for _, code in watch.deaths] == [1]
    assert child.last_words == "to the console"
    assert watch.lines == ["w-1 | to the console"]
    assert (tmp_path / "w-1.log").read_text() == "to the log\n"


async def test_a_child_that_keeps_dying_is_tried_ever_more_slowly(tmp_path: Path) -> None:
    """The pauses that are said are those of the back-off."""
    watch = Watch()

    async def three_times(child: Child, code: int) -> bool:
        watch.deaths.append((child.process_id, code))
        return len(watch.deaths) < 3

    spec = ChildSpec(
        kind="worker", name="w-1", command=(sys.executable, "-c", "raise SystemExit(3)")
    )
    child = Child(spec, tmp_path, say=watch.lines.append, on_death=three_times)
    await child.run()
    assert watch.lines == [
        "w-1 ended with exit code 3; starting again in 0.1 s",
        "w-1 ended with exit code 3; starting again in 0.2 s",
    ]
    assert len({process_id for process_id, _ in watch.deaths}) == 3


async def test_settings_of_the_parent_do_not_reach_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child's settings are its flags: MESH_* of the parent is not inherited, but what the
    supervisor itself sets."""
    monkeypatch.setenv("MESH_WORKER_ENGINE", "simulated")
    code = "import os; print(sorted(k for k in os.environ if k.startswith('MESH_')))"
    await Watch(again=False).child(tmp_path, code).run()
    said = (tmp_path / "w-1.log").read_text()
    assert said == "['MESH_PROCESS_NONCE', 'MESH_SUPERVISOR_PID']\n"


async def test_stages_stop_one_after_the_other(tmp_path: Path, until: Until) -> None:
    """The second stage gets its signal only when the first has ended."""
    watch = Watch()
    note = f"open({str(tmp_path / 'order')!r}, 'a').write"
    code = (
        "import signal, sys\n"
        f"def end(*_): {note}(sys.argv[1]); sys.exit(0)\n"
        "signal.signal(15, end); print('up', flush=True)\n"
        "while True: signal.pause()"
    )
    children = []
    for name in ("bridge", "worker"):
        spec = ChildSpec(kind=name, name=name, command=(sys.executable, "-c", code, name[0]))
        children.append(Child(spec, tmp_path, say=watch.lines.append, on_death=watch.on_death))
    async with task_scope() as tasks:
        for child in children:
            tasks.create_task(child.run())
        logs = [tmp_path / "bridge.log", tmp_path / "worker.log"]
        await until(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
        await stop_in_order([[children[0]], [children[1]]], time.monotonic() + 5)
    assert (tmp_path / "order").read_text() == "bw"
    assert watch.deaths == [], "ended as asked: nobody's death"


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_what_does_not_end_in_time_is_killed(
    tmp_path: Path, until: Until, is_frozen: bool
) -> None:
    """A child that ignores SIGTERM, frozen or not, is gone after the grace time."""
    watch = Watch()
    child = watch.child(tmp_path, IGNORES_SIGTERM + STAYS)
    async with task_scope() as tasks:
        tasks.create_task(child.run())
        log = tmp_path / "w-1.log"
        await until(lambda: log.exists() and "up" in log.read_text())
        assert child.pid is not None
        process = psutil.Process(child.pid)
        if is_frozen:
            process.suspend()
        await stop_in_order([[child]], time.monotonic() + 0.3)
        await child.ended(time.monotonic() + 5)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert not psutil.pid_exists(process.pid)


async def test_leaving_the_scope_leaves_no_child(tmp_path: Path, until: Until) -> None:
    """A supervisor that is cancelled, or fails, takes its children with it."""
    child = Watch().child(tmp_path, STAYS)
    pids: list[int | None] = []

    async def fail_later() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(child.run())
            await until(lambda: child.pid)
            pids.append(child.pid)
            raise RuntimeError("of the supervisor")

    with pytest.raises(ExceptionGroup):
        await fail_later()
    assert pids[0] is not None
    assert not psutil.pid_exists(pids[0])


async def test_a_log_that_grew_large_is_put_aside(tmp_path: Path) -> None:
    """At the start of a child, once it is over 10 MiB."""
    log = tmp_path / "w-1.log"
    with log.open("wb") as file:
        file.truncate(10 * 2**20 + 1)
    await Watch(again=False).child(tmp_path, SAYS_AND_DIES).run()
    assert log.read_text() == "to the log\n"
    assert (tmp_path / "w-1.log.1").stat().st_size == 10 * 2**20 + 1


async def test_a_folder_without_logs_is_said(tmp_path: Path) -> None:
    """When the log can't be written the error names the file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't write .*w-1\.log"):
        await Watch().child(tmp_path / "file", STAYS).run()


def test_exits_in_words() -> None:
    """A signal by its name."""
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-250) == "was ended by signal 250"
