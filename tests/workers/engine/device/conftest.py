"""Tests marked ``gpu`` run where CUDA is."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, torch sees none"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
