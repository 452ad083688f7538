"""Policy files, looked at before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def check_policy_file(path: Path | None, models: Collection[str]) -> None:
    """Say at once what is wrong with the file, not when the bus is there.

    Raises:
        ConfigError: a control process that serves ``models`` would refuse it.
    """
    if path is not None:
        from pipeline.policies import read_policies

        read_policies(path, models)
