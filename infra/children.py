"""Child processes: started, watched, started again, stopped in order.

A child runs in a session of its own, so that the terminal's Ctrl-C reaches the supervisor only;
the kernel ends it when the supervisor dies. Its stdout is a log file, its stderr comes to the
supervisor line by line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from infra.backoff import Backoff
from infra.lifeline import NONCE, SUPERVISOR_PID, end_with_parent
from schemas.errors import ConfigError, MeshError

_LOG_BYTES = 10 * 2**20  # a log file over this becomes <name>.log.1 when its child starts
_LINE_BYTES = 2**16
_PASSED_ON = frozenset({"MESH_TRACE_HOPS"})  # no setting: ``mesh bench hop`` asks for it


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run. ``kind`` and ``name`` make the process id, with a nonce new for each start."""

    kind: str
    name: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    fds: tuple[int, ...] = ()  # open descriptors that it inherits

    def process_id(self, nonce: str) -> str:
        """As ``infra.process.new_process_id`` makes it in the child."""
        return f"{self.kind}-{self.name}-{nonce}"


class Child:
    """One child; :meth:`run` keeps it alive until :meth:`stop`.

    Args:
        logs: the folder for what it writes to stdout; None: that goes to our own.
        say: called with a line for the console.
        on_death: awaited with the child and its exit code when it ended without being asked to;
            True: start it again.
    """

    def __init__(
        self,
        spec: ChildSpec,
        logs: Path | None,
        *,
        say: Callable[[str], None],
        on_death: Callable[[Child, int], Awaitable[bool]],
    ) -> None:
        self.spec = spec
        self.process_id = ""
        self.last_words = ""  # the last line on stderr
        self.log = logs / f"{spec.name}.log" if logs else None
        self._say = say
        self._on_death = on_death
        self._backoff = Backoff()
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The running child's pid."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def run(self) -> None:
        """Start, and start again with back-off, until stopped or ``on_death`` says no."""
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set() or not await self._on_death(self, code):
                return
            wait_s = self._backoff.after(time.monotonic() - started_s, is_clean=code == 0)
            self._say(f"{self.spec.name} {describe_exit(code)}; starting again in {wait_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and start it no more. SIGCONT follows: a stopped process takes only
        SIGKILL otherwise."""
        self._stopping.set()
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
                os.kill(self.pid, signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the running child, if there is one."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self, deadline_s: float) -> None:
        """Wait until the running child, if any, has ended or the monotonic clock says
        ``deadline_s``."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                    await self._process.wait()

    async def _run_once(self) -> int:
        nonce = secrets.token_hex(4)
        self.process_id = self.spec.process_id(nonce)
        self.last_words = ""
        env = {
            **inherited_environment(),
            **self.spec.env,
            NONCE: nonce,
            SUPERVISOR_PID: str(os.getpid()),
        }
        with self._open_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
                start_new_session=True,
                pass_fds=self.spec.fds,
                preexec_fn=die_with(os.getpid(), signal.SIGTERM),
            )
        if self._stopping.is_set():  # asked to while the child was being made
            self.stop()
        try:
            await self._relay(self._process)
            return await self._process.wait()
        finally:  # also when the supervisor is cancelled: no child outlives it
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    async def _relay(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None, "stderr is a pipe"
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # longer than the buffer: the reader has dropped it
                continue
            if not line:
                return
            self.last_words = line.decode(errors="replace").rstrip()
            if not self._stopping.is_set():
                self._say(f"{self.spec.name} | {self.last_words}")

    def _open_log(self) -> contextlib.AbstractContextManager[BinaryIO | None]:
        if self.log is None:
            return contextlib.nullcontext()
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
            return self.log.open("ab")
        except OSError as error:
            raise ConfigError(
                f"can't write {self.log}: {error.strerror}", param="mesh.data"
            ) from error


def inherited_environment() -> dict[str, str]:
    """Our environment without settings: a child gets all of its own by flags."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("MESH_") or key in _PASSED_ON
    }


def die_with(supervisor: int, number: signal.Signals) -> Callable[[], None]:
    """What a child calls between fork and exec to get ``number`` when its parent dies."""

    def in_child() -> None:
        end_with_parent(number)
        if os.getppid() != supervisor:  # it died between fork and the line above
            os._exit(1)

    return in_child


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


async def stop_in_order(stages: list[list[Child]], deadline_s: float) -> None:
    """SIGTERM to one stage after the other, each waited for; SIGKILL for what is left when
    ``deadline_s`` (monotonic) has passed."""
    for stage in stages:
        for child in stage:
            child.stop()
        for child in stage:
            await child.ended(deadline_s)
    left = [child for stage in stages for child in stage if child.pid is not None]
    for child in left:
        child.stop(signal.SIGKILL)


class ChildFailed(MeshError):
    """A child can't start at all; restarting it would change nothing."""

    code = "child_failed"
