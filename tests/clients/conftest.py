"""One mesh for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.running_mesh import running_mesh

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """OpenAI's base URL of a mesh with prefill and decode workers, simulated."""
    with running_mesh(tmp_path_factory.mktemp("mesh"), "--speed", "40") as mesh:
        yield f"{mesh.url}/v1"


@pytest.fixture(scope="session")
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """The official client, which tries nothing twice."""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as made:
        yield made
