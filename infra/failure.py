"""How a command ends with an error: one line on stderr and an exit code."""

from __future__ import annotations

import sys

from schemas.errors import ConfigError, InvalidRequest, MeshError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what shells expect after Ctrl-C


def first_mesh_error(error: BaseException) -> MeshError | None:
    """``error`` itself, or the first of the group, that is ours; None when something else is in
    the group too, which must not be hidden."""
    if isinstance(error, MeshError):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [first_mesh_error(inner) for inner in error.exceptions]
        return found[0] if found and all(found) else None
    return None


def report(command: str, error: MeshError) -> int:
    """Print ``command: code: message (key)`` to stderr; the exit code: 2 when the caller can
    mend it by asking differently, else 1."""
    key = f" ({error.param})" if error.param else ""
    print(f"{command}: {error.code}: {error.message}{key}", file=sys.stderr, flush=True)
    return EXIT_USAGE if isinstance(error, ConfigError | InvalidRequest) else EXIT_FAILED
