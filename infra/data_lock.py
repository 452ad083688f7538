"""One mesh per data directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from schemas.errors import ConfigError

_LOCK = "mesh.lock"


@contextlib.contextmanager
def data_lock(data: Path) -> Iterator[None]:
    """Hold ``data`` for this process; makes it when missing. The kernel lets go of the lock when
    the process dies, however it does.

    Raises:
        ConfigError: another mesh runs there, or the directory can't be made or written.
    """
    try:
        data.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(data / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"can't use the data directory {data}: {error.strerror}", param="mesh.data"
        ) from error
    try:
        _claim(descriptor, data)
        yield
    finally:
        os.close(descriptor)


def _claim(descriptor: int, data: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError as error:
        owner = os.read(descriptor, 32).decode(errors="replace").strip()
        raise ConfigError(
            f"another mesh runs in {data}, pid {owner or 'unknown'}", param="mesh.data"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"can't write to the data directory {data}: {error.strerror}", param="mesh.data"
        ) from error
