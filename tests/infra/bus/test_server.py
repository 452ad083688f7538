import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.bus import Bus, EmbeddedBroker, ensure_topology
from schemas import subjects
from schemas.errors import BusUnavailable, ConfigError


async def test_it_starts_fast_and_leaves_nothing(tmp_path):
    """Ready soon; after stop there is no process, no port, no bus.env."""
    broker = EmbeddedBroker(tmp_path)
    started = time.monotonic()
    await broker.start()
    assert time.monotonic() - started < 30
    pid, port = broker.pid, broker.port
    async with await Bus.connect(broker.url("control"), role="control"):
        pass
    await broker.stop()
    assert not broker.is_running
    assert not broker.env_file.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
    await broker.stop()  # twice is fine


async def test_a_stopped_store_starts_again_with_what_it_had(tmp_path):
    """Another broker object on the same directory finds what was stored, with new passwords."""
    async with EmbeddedBroker(tmp_path) as first:
        old_url = first.url("control")
        async with await Bus.connect(old_url, role="control") as bus:
            await ensure_topology(bus)
            stored = await bus.publish_stored(subjects.request_record("request-1"), b"x")
    async with EmbeddedBroker(tmp_path) as second:
        assert second.url("control").split("@")[0] != old_url.split("@")[0]
        async with await Bus.connect(second.url("control"), role="control") as bus:
            found = await bus.last_message("MESH_TOKENS", subjects.request_record("request-1"))
            assert found is not None
            assert found.seq == stored.seq


async def test_bus_env_is_for_its_owner_only(broker, times):
    """``bus.env`` and the configuration hold passwords: mode 0600, and the urls work."""
    for path in (broker.env_file, broker.data_dir / "bus" / "nats.conf"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = dict(line.split("=", 1) for line in broker.env_file.read_text().splitlines())
    assert lines["NATS_URL"] == broker.url("client")
    assert lines["MESH_NATS_URL_WORKER"] == broker.url("worker")
    async with await Bus.connect(lines["NATS_URL"], role="client", times=times):
        pass


async def test_a_restart_keeps_port_and_passwords(broker):
    """``restart`` kills: same port, same passwords, another process."""
    port, pid, url = broker.port, broker.pid, broker.url("bridge")
    await broker.restart()
    assert (broker.port, broker.url("bridge")) == (port, url)
    assert broker.pid != pid
    async with await Bus.connect(url, role="bridge"):
        pass


async def test_it_listens_on_loopback_only(broker):
    """No other interface accepts."""
    listening = _listening_sockets()
    port = f"{broker.port:04X}"
    assert {row[1] for row in listening if row[1].endswith(f":{port}")} == {f"0100007F:{port}"}


async def test_a_port_in_use_is_named(tmp_path):
    """The error names the key and the port, with the broker's own reason."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        broker = EmbeddedBroker(tmp_path, port)
        with pytest.raises(ConfigError, match=f"port {port} .*in use") as error:
            await broker.start()
    assert error.value.param == "port"
    assert not broker.is_running


async def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    """The error names the path and the reason of the system."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="Not a directory") as error:
        await EmbeddedBroker(blocked / "data").start()
    assert error.value.param == "data_dir"
    assert str(blocked / "data") in str(error.value)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 512 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system can't be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_is_named(small_disk):
    """No space for the store: the error says so and names the path."""
    with pytest.raises(ConfigError, match="No space left") as error:
        await EmbeddedBroker(small_disk).start()
    assert error.value.param == "data_dir"
    assert str(small_disk) in str(error.value)


async def test_a_store_that_the_broker_cannot_use_is_explained(tmp_path):
    """What the broker itself finds wrong at its start is in the error, from its log."""
    store = tmp_path / "bus" / "jetstream"
    store.parent.mkdir()
    store.write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match=r"(?i)jetstream.*not a directory") as error:
        await EmbeddedBroker(tmp_path).start()
    assert error.value.param == "data_dir"


async def test_two_brokers_do_not_share_a_directory(tmp_path):
    """The second is refused while the first runs, and starts when that has ended."""
    async with EmbeddedBroker(tmp_path):
        with pytest.raises(ConfigError, match="in use by another broker"):
            await EmbeddedBroker(tmp_path).start()
    async with EmbeddedBroker(tmp_path):
        pass


@pytest.mark.parametrize("user", ["control", "a.b", "", "*"])
def test_a_client_user_must_be_a_subject_token(tmp_path, user):
    """Names that would break the permissions are refused."""
    with pytest.raises(ConfigError):
        EmbeddedBroker(tmp_path, clients=(user,))


def test_it_ends_with_a_killed_supervisor(tmp_path):
    """SIGKILL the process that started it: the broker is gone within a second."""
    script = f"""
import asyncio, sys
from infra.bus import EmbeddedBroker
async def main():
    broker = EmbeddedBroker({str(tmp_path)!r})
    await broker.start()
    print(broker.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        fd = os.pidfd_open(pid)
        try:
            supervisor.send_signal(signal.SIGKILL)
            supervisor.wait(5)
            assert _ends_within(fd, 1.0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(fd)


async def test_a_dead_broker_is_noticed(broker):
    """``wait`` returns when the process ends by itself."""
    assert broker.is_running
    os.kill(broker.pid, signal.SIGKILL)
    assert await broker.wait() == -signal.SIGKILL
    assert not broker.is_running


async def test_the_old_password_is_worth_nothing(tmp_path):
    """A client of the broker before does not get in, and is told why."""
    async with EmbeddedBroker(tmp_path) as first:
        password = first.url("worker").split(":")[2].split("@")[0]
    async with EmbeddedBroker(tmp_path) as second:
        with pytest.raises(BusUnavailable, match="wrong user or password"):
            await Bus.connect(f"nats://worker:{password}@127.0.0.1:{second.port}", role="worker")


def _listening_sockets():
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return [row for row in rows if row[3] == "0A"]


def _ends_within(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])
