"""A task group for helpers that run until the work beside them is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator


class _BlockEnded(Exception):
    """Raised inside the group, the way to cancel all of its tasks."""


@contextlib.asynccontextmanager
async def task_scope() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """A task group that, when its block ends, cancels what still runs and waits for it.

    Errors of tasks and block come as an exception group, as from ``asyncio.TaskGroup``.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
            raise _BlockEnded
    except* _BlockEnded:
        pass
