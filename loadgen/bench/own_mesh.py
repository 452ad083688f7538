"""A mesh of a bench's own: started as a child, in a folder of its own, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.children import die_with
from infra.config import BusConfig
from infra.mesh_file import RunningMesh, read_mesh_file
from schemas.errors import MeshError

START_TIMEOUT_S = 120.0  # the first start may convert a model
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000


class MeshNotStarted(MeshError):
    """The child ended, or was not ready in time; the message ends with its last output."""

    code = "mesh_not_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMesh:
    """A mesh that is ready. The control user hears all that is said on its bus."""

    url: str
    nats_url: str
    control_nats_url: str
    pid: int


@asynccontextmanager
async def own_mesh(
    flags: Sequence[str], env: Mapping[str, str] | None = None, *, data: Path | None = None
) -> AsyncGenerator[OwnMesh, None]:
    """``mesh up`` with ``flags``, on free ports, ready when the block begins.

    It ends with the block, and also when this process is killed. ``data`` is kept afterwards;
    without it a folder is made that goes with the mesh.

    Raises:
        MeshNotStarted: it did not become ready.
    """
    with _folder(data) as data:
        command = (_mesh_script(), "up", "--port", "0", "--data", str(data), *flags)
        with (data / "up.log").open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # a Ctrl-C in the terminal is for the bench, which stops it
                preexec_fn=die_with(os.getpid(), signal.SIGINT),
            )
            try:
                mesh = await _until_ready(child, data)
                control = BusConfig(data=data).url("control")
                yield OwnMesh(
                    url=mesh.url, nats_url=mesh.nats_url, control_nats_url=control, pid=mesh.pid
                )
            finally:
                await _stop(child)


@contextmanager
def _folder(given: Path | None) -> Generator[Path, None, None]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as made:
        yield Path(made)


def _mesh_script() -> str:
    """The ``mesh`` of the environment that runs us, whatever the PATH says."""
    return str(Path(sys.executable).with_name("mesh"))


async def _until_ready(child: asyncio.subprocess.Process, data: Path) -> RunningMesh:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if child.returncode is not None:
                    raise MeshNotStarted(f"mesh up ended with {child.returncode}: {_tail(data)}")
                mesh = read_mesh_file(data)
                if mesh is not None:
                    return mesh
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise MeshNotStarted(
            f"mesh up was not ready within {START_TIMEOUT_S:g} s: {_tail(data)}"
        ) from None


def _tail(data: Path) -> str:
    return (data / "up.log").read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()


async def _stop(child: asyncio.subprocess.Process) -> None:
    """Ask once to drain, then make sure."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.returncode is not None:
            return
        child.send_signal(number)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.wait()
        except TimeoutError:
            continue
