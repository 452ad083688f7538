"""``mesh profile`` as a user types it, with a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from structlog.testing import capture_logs
from typer.testing import CliRunner

from infra.bus import Bus, EmbeddedBroker
from infra.cli import app
from pipeline.profile_files import read_profile, shipped_profiles
from pipeline.profiles import ProfileBook
from schemas.errors import ConfigError
from tests.tiny_models import tiny_model

TINY_STEPS = ("--kernels", "general", "--dtype", "fp32", "--threads", "1", "--repeats", "1")
TINY_STEPS += ("--max-num-sequences", "4", "--max-batch-tokens", "64", "--kv-memory", "4MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"tiny={tiny_model(tmp_path_factory.mktemp('models'))}"


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is not the command's: its log stays as it is, and off stdout."""
    monkeypatch.setattr("infra.log.set_up_process", lambda *_, **__: None)
    with capture_logs():
        yield


def profile(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments], env={"COLUMNS": "200"})


def test_a_model_is_measured_into_a_file(model: str, tmp_path: Path) -> None:
    """The costs, what they predict beside what was measured, and a file that a worker can take."""
    out = tmp_path / "tiny.toml"
    shown = profile("--model", model, *TINY_STEPS, "--out", str(out))
    assert shown.exit_code == 0, shown.output
    made = read_profile(out)
    assert made.engine == "torch fp32"
    assert made.name.startswith("tiny@")
    assert made.name.endswith(".torch-fp32.cpu-1")
    assert made.prefill_error > 0
    for text in (
        made.name,
        "prompt of 64, 0 cached",
        "decode of 4, context",
        "mean error: prefill",
    ):
        assert text in shown.output
    assert f"written to {out}" in shown.output


async def test_a_model_is_measured_for_a_mesh(
    model: str, bus: Bus, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """It is registered under the name that was given, and listed from then on."""
    at = ("--nats", broker.url("control"), "--data", str(tmp_path))
    arguments = ("--model", model, *TINY_STEPS, "--name", "mine", "--json", *at)
    shown = await asyncio.to_thread(profile, *arguments)
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    assert said["profile"]["name"] == "mine"
    assert {"part", "size", "before", "measured_ms", "predicted_ms"} == set(said["points"][0])
    stored = await ProfileBook(bus).get("mine")
    assert stored is not None
    assert stored.costs.prefill_base_ms == said["profile"]["costs"]["prefill_base_ms"]
    listed = await asyncio.to_thread(profile, "--list", "--json", *at)
    found = json.loads(listed.stdout)
    assert [one["name"] for one in found["registered"]] == ["mine"]
    assert [one["name"] for one in found["shipped"]] == list(shipped_profiles())


def test_shipped_profiles_are_listed_without_a_mesh(tmp_path: Path) -> None:
    """With a word on why there are no others."""
    shown = profile("--list", "--data", str(tmp_path))
    assert shown.exit_code == 0
    for name in ("registered: none", "no mesh runs here", *shipped_profiles()):
        assert name in shown.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--data", "/nowhere"), "or give --out FILE"),
        (("--nats", "nats://127.0.0.1:9", "--data", "/nowhere"), "or give --out FILE"),
        (("--out", "/nowhere/here.toml"), "can't write /nowhere/here.toml"),
        (("--out", "/"), "can't write /"),
        (("--out", "x.toml", "--model", "/nowhere"), "nowhere"),
        (("--list", "--nats", "nats://127.0.0.1:9"), "127.0.0.1:9"),
    ],
)
def test_what_can_not_work_is_said_at_once(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured, in one line."""
    monkeypatch.chdir(tmp_path)
    shown = profile(*arguments)
    assert shown.exit_code != 0
    said = f"{shown.output}{shown.exception}"
    assert reason in said
    assert "Traceback" not in said


def test_a_simulated_engine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs what it is told."""
    monkeypatch.setenv("MESH_WORKER_ENGINE", "simulated")
    shown = profile("--out", "x.toml")
    assert isinstance(shown.exception, ConfigError)
    assert shown.exception.param == "worker.engine"
