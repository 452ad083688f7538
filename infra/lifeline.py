"""A child of ``mesh up`` ends when its supervisor ends, however that happened."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

from schemas.errors import MeshError

SUPERVISOR_PID = "MESH_SUPERVISOR_PID"
NONCE = "MESH_PROCESS_NONCE"  # chosen by the supervisor, so that it knows its child's process id
_PR_SET_PDEATHSIG = 1
# Loaded here, not in a child between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send ``number`` to this process when the thread that started it ends.

    Does nothing where the kernel is not Linux.
    """
    if _libc is not None and _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def follow_supervisor(env: Mapping[str, str] = os.environ) -> None:
    """In a child: end with the supervisor that ``MESH_SUPERVISOR_PID`` names, if it does.

    The parent asks the kernel for a signal at spawn already; asking again here costs nothing, and
    comparing the parent's id afterwards closes the gap in which the supervisor may have died.

    Raises:
        MeshError: the supervisor is gone.
    """
    if SUPERVISOR_PID in env:
        end_with_parent(signal.SIGTERM)
        if is_orphan(env):
            raise MeshError(f"the supervisor (pid {env[SUPERVISOR_PID]}) is gone")


def is_orphan(env: Mapping[str, str] = os.environ) -> bool:
    """Whether there was a supervisor, and is no more."""
    return SUPERVISOR_PID in env and str(os.getppid()) != env[SUPERVISOR_PID]
