"""A mesh of a bench's own: started as a child, in a folder of its own, gone afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from schemas.errors import MeshError

START_TIMEOUT_S = 120.0  # the first start may convert a model
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05
_LOG_TAIL_BYTES = 2000


class MeshAddress(msgspec.Struct, frozen=True):
    """What ``mesh up`` writes to ``<data>/mesh.json`` once every role is ready."""

    url: str
    nats_url: str
    pid: int


class MeshNotStarted(MeshError):
    """The child ended, or was not ready in time; the message ends with its last output."""

    code = "mesh_not_started"


@asynccontextmanager
async def own_mesh(
    flags: Sequence[str], env: Mapping[str, str] | None = None
) -> AsyncGenerator[MeshAddress, None]:
    """``mesh up`` with ``flags``, on free ports, ready when the block begins.

    Raises:
        MeshNotStarted: it did not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as folder:
        data = Path(folder)
        command = (_mesh_script(), "up", "--port", "0", "--data", folder, *flags)
        with (data / "up.log").open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,  # a Ctrl-C in the terminal is for the bench, which stops it
            )
            try:
                yield await _until_ready(child, data)
            finally:
                await _stop(child)


def _mesh_script() -> str:
    """The ``mesh`` of the environment that runs us, whatever the PATH says."""
    return str(Path(sys.executable).with_name("mesh"))


async def _until_ready(child: asyncio.subprocess.Process, data: Path) -> MeshAddress:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                if child.returncode is not None:
                    raise MeshNotStarted(f"mesh up ended with {child.returncode}: {_tail(data)}")
                address = _read_address(data / "mesh.json")
                if address is not None:
                    return address
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise MeshNotStarted(
            f"mesh up was not ready within {START_TIMEOUT_S:g} s: {_tail(data)}"
        ) from None


def _read_address(path: Path) -> MeshAddress | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeshAddress)
    except FileNotFoundError:
        return None


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
