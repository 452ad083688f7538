"""A mesh as a user starts it: ``mesh up`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.mesh_file import MESH_FILE, RunningMesh, read_mesh_file

MESH = Path(sys.executable).with_name("mesh")
READY_S = 90.0  # the conversion of the weights, when nobody did it before


@contextmanager
def running_mesh(data: Path, *flags: str) -> Iterator[RunningMesh]:
    """``mesh up`` with the default model and simulated engines, ready; drained at the end."""
    command = [str(MESH), "up", "--engine", "simulated", "--port", "0", "--data", str(data)]
    with (data / "out").open("w") as out:
        process = subprocess.Popen([*command, *flags], stdout=out, stderr=out)
    try:
        ends = time.monotonic() + READY_S
        while (mesh := read_mesh_file(data)) is None:
            assert process.poll() is None, (data / "out").read_text()
            assert time.monotonic() < ends, f"no {MESH_FILE}: {(data / 'out').read_text()}"
            time.sleep(0.05)
        yield mesh
    finally:
        process.terminate()
        process.wait(30)
