import asyncio
import os
import sys
from pathlib import Path

import pytest

from loadgen.bench import own_mesh as module
from loadgen.bench.own_mesh import MeshNotStarted, own_mesh

READY = """#!/usr/bin/env python3
import json, os, signal, sys, time
assert sys.argv[1:4] == ["up", "--port", "0"] and sys.argv[6:] == ["--both", "1"], sys.argv
folder = sys.argv[5]
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(1))
content = {"url": "http://u", "nats_url": os.environ["SOME_URL"], "pid": os.getpid(), "new": 1}
with open(folder + "/part", "w") as file:
    json.dump(content, file)
with open(folder + "/bus.env", "w") as file:
    file.write("MESH_NATS_URL_CONTROL=nats://c\\n")
os.rename(folder + "/part", folder + "/mesh.json")
while not caught:
    signal.pause()
"""
DYING = """#!/usr/bin/env python3
print("no room on the disk")
raise SystemExit(3)
"""
SILENT = """#!/usr/bin/env python3
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
print("still loading", flush=True)
while True:
    signal.pause()
"""


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    path = folder / "mesh"
    path.write_text(script)
    path.chmod(0o755)
    monkeypatch.setattr(module, "_mesh_script", lambda: str(path))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_the_mesh_is_there_in_the_block_and_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ready means its addresses are known; leaving interrupts it and waits for its end."""
    use(monkeypatch, tmp_path, READY)
    async with asyncio.timeout(60), own_mesh(["--both", "1"], {"SOME_URL": "nats://n"}) as mesh:
        assert (mesh.url, mesh.nats_url) == ("http://u", "nats://n")
        assert mesh.control_nats_url == "nats://c"
        assert is_alive(mesh.pid)
    assert not is_alive(mesh.pid)


BENCH = """
import asyncio, signal, sys
from pathlib import Path
from loadgen.bench import own_mesh as module

module._mesh_script = lambda: sys.argv[1]

async def main():
    async with module.own_mesh(["--both", "1"], {"SOME_URL": "nats://n"}) as mesh:
        print(mesh.pid, flush=True)
        signal.pause()

asyncio.run(main())
"""


async def test_the_mesh_ends_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the bench leaves no mesh behind."""
    script = tmp_path / "mesh"
    script.write_text(READY)
    script.chmod(0o755)
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    async with asyncio.timeout(60):
        bench = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BENCH, str(script), stdout=asyncio.subprocess.PIPE, env=env
        )
        assert bench.stdout is not None
        mesh_fd = os.pidfd_open(int(await bench.stdout.readline()))
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(mesh_fd, ended.set)
        bench.kill()
        await bench.communicate()
        await ended.wait()
    asyncio.get_running_loop().remove_reader(mesh_fd)
    os.close(mesh_fd)


async def test_a_mesh_that_dies_at_start_is_an_error_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last output is in the message, since the folder with the log goes away."""
    use(monkeypatch, tmp_path, DYING)
    with pytest.raises(MeshNotStarted, match="ended with 3: no room on the disk"):
        async with asyncio.timeout(60), own_mesh([]):
            pass


async def test_a_mesh_that_never_gets_ready_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Waiting is bounded, and the child does not outlive it."""
    use(monkeypatch, tmp_path, SILENT)
    monkeypatch.setattr(module, "START_TIMEOUT_S", 1.0)
    with pytest.raises(MeshNotStarted, match="not ready within 1 s: still loading"):
        async with asyncio.timeout(60), own_mesh([]):
            pass
