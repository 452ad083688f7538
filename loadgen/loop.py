"""The event loop that a measuring process runs on."""

from __future__ import annotations

import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable


def fast_loop() -> Callable[[], AbstractEventLoop] | None:
    """uvloop's, where there is one: its timers and reads cost about half. For asyncio.Runner."""
    if sys.platform != "linux":
        return None
    import uvloop

    return uvloop.new_event_loop
