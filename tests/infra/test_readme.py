"""The README is true: its settings are those of the code, its programs run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

import pytest

from infra.config import (
    BridgeConfig,
    BusConfig,
    ControlConfig,
    UpConfig,
    WorkerConfig,
    read_bus_env,
)
from infra.mesh_file import RunningMesh
from infra.settings import settings_of
from schemas.codec import decode_json
from schemas.requests import InferenceRequest
from tests.running_mesh import MESH, running_mesh

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The fenced block behind ``<!-- test: name -->``."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block {name}"
    return found[1]


def settings_table() -> list[str]:
    """The rows as the configuration classes would write them; ``python test_readme.py`` prints
    them."""
    rows = []
    for kind in (BusConfig, UpConfig, ControlConfig, WorkerConfig, BridgeConfig):
        for one, found in settings_of(kind):
            default = "" if one.default is MISSING or one.default in ("", -1, None) else one.default
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            flag = f" (`{found.flag}`)" if found.flag[2:].replace("-", "_") != one.name else ""
            shown = f"`{shown}`" if shown else ""
            rows.append(f"| {kind.table} | `{one.name}`{flag} | {shown} | {found.help} |")
    return rows


def test_the_settings_are_those_of_the_code() -> None:
    """Every setting with its default, and no other."""
    table = README.partition("<!-- test: settings -->\n")[2].partition("\n\n")[0]
    assert table.splitlines()[2:] == settings_table()


def test_links_lead_somewhere() -> None:
    """Files that the README names are there."""
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_json_is_a_request() -> None:
    """What `nats pub` sends is what admission decodes, and goes to its model's subject."""
    found = re.fullmatch(r"nats pub (\S+) '(.*)'\n", block("json"), re.DOTALL)
    assert found
    request = decode_json(found[2].encode(), InferenceRequest)
    assert found[1] == f"mesh.v1.admission.{request.model}"
    assert f"client.{request.request_id}.>" in README
    assert request.sampling.max_tokens == 60


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningMesh, Path]]:
    """`mesh up` with the default model and simulated engines."""
    data = tmp_path_factory.mktemp("mesh")
    with running_mesh(data, "--speed", "10") as mesh:
        yield mesh, data


@pytest.mark.parametrize("name", ["http", "client", "plain"])
def test_a_program_runs(running: tuple[RunningMesh, Path], name: str) -> None:
    """As it stands, but for the port: it prints an answer and ends."""
    mesh, data = running
    code = block(name).replace("http://127.0.0.1:8000", mesh.url)
    env = {**os.environ, "NATS_URL": read_bus_env(data / "bus.env")["NATS_URL"]}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


def test_generate_streams_an_answer(running: tuple[RunningMesh, Path]) -> None:
    """`mesh generate` finds the mesh by its data directory and the model by being the only one."""
    _, data = running
    command = [str(MESH), "generate", "Hello!", "--data", str(data), "--max-tokens", "12"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    ended = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(ended.stdout)
    assert found["text"].strip() == text.strip() != ""
    assert found["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 12


def test_generate_says_which_models_there_are(running: tuple[RunningMesh, Path]) -> None:
    """A wrong model is refused by admission, in its words, on one line."""
    _, data = running
    ended = subprocess.run(
        [str(MESH), "generate", "x", "--data", str(data), "--model", "gpt-9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("mesh generate: model_not_found: ")
    assert "smollm2-135m" in ended.stderr
    assert ended.stderr.count("\n") == 1


if __name__ == "__main__":
    print("\n".join(settings_table()))
