"""``<data>/mesh.json``: how a program that started ``mesh up`` learns that it is ready, and where.

It is there from the moment when every role is ready until the drain begins. It holds a password,
so only its owner may read it. After a SIGKILL it stays: whoever finds one asks whether ``pid``
lives.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from schemas.errors import ConfigError, SchemaError

MESH_FILE = "mesh.json"


class RunningMesh(msgspec.Struct, frozen=True, kw_only=True):
    """Where a mesh can be reached, and the process that supervises it."""

    url: str  # of the bridge
    nats_url: str  # for clients, with user and password
    pid: int


@contextlib.contextmanager
def mesh_file(data: Path, mesh: RunningMesh) -> Iterator[None]:
    """The file is there while the block runs; it appears whole.

    Raises:
        ConfigError: it can't be written.
    """
    path, new = data / MESH_FILE, data / f".{MESH_FILE}.{os.getpid()}"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(mesh) + b"\n")
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"can't write {path}: {error.strerror}", param="mesh.data") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read_mesh_file(data: Path) -> RunningMesh | None:
    """What stands in the file; None when there is none.

    Raises:
        SchemaError: it is no such file.
    """
    path = data / MESH_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningMesh)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise SchemaError(f"{path}: {error}", param="$") from error
