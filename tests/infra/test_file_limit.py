"""The limit of open files."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from infra.file_limit import raise_file_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = raise_file_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
assert held == hard or hard == resource.RLIM_INFINITY, (held, hard)
"""


def test_a_process_may_open_as_many_files_as_the_kernel_lets_it() -> None:
    """A low soft limit, as shells set it, does not bound the connections of a bridge."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
