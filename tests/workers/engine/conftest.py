"""What the engine's tests share: model folders, made once per session or once per machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model

TinyFolder = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """``tiny_folder(architecture)``: a tiny random model's folder."""
    base = tmp_path_factory.mktemp("tiny-models")
    return lambda architecture: tiny_model(base, architecture)


@pytest.fixture(scope="session")
def default_folder() -> Path:
    """The converted default model, in the user's cache: converted once per machine."""
    from workers.engine.sources import DEFAULT_MODEL, default_cache_dir, resolve_source

    return resolve_source(DEFAULT_MODEL, default_cache_dir(), print)
