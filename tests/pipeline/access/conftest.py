"""A clock that stands still, and budgets that follow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.api_key import hash_of
from pipeline.access.budgets import Budgets, open_budgets
from pipeline.access.key import ApiKey

KEY = "mesh-" + "k" * 43
PATIENCE_S = 60.0  # a busy machine


@dataclass
class Clock:
    now_s: float = 5000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budgets(tmp_path: Path, clock: Clock) -> Iterator[Budgets]:
    with open_budgets(tmp_path, patience_s=PATIENCE_S, now_s=clock) as opened:
        yield opened


def key(**more: object) -> ApiKey:
    """The key ``KEY`` of the tenant acme."""
    given = {"name": "acme-1", "digest": hash_of(KEY.encode()), "tenant": "acme", **more}
    return ApiKey(**given)  # type: ignore[arg-type]
