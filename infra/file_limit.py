"""Open files: a process that serves thousands of connections may have as many as it is let.

Shells give 1,024 as a rule, for the sake of programs that use ``select``; none of ours does.
"""

from __future__ import annotations

import resource
import sys


def raise_file_limit() -> int:
    """Raise our soft limit of open files to the hard one.

    Returns:
        The limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard
