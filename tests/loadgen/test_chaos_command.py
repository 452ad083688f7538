"""``mesh chaos``: flags, refusals, and where a running mesh is found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from infra.cli import app
from infra.mesh_file import RunningMesh
from loadgen.chaos.command import _attached
from schemas.errors import ConfigError

CLIENT, CONTROL = "nats://client:c@127.0.0.1:1", "nats://control:d@127.0.0.1:1"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of a mesh that runs."""
    env = f"NATS_URL={CLIENT}\nMESH_NATS_URL_CLIENT={CLIENT}\nMESH_NATS_URL_CONTROL={CONTROL}\n"
    (tmp_path / "bus.env").write_text(env)
    mesh = RunningMesh(url="http://127.0.0.1:2", nats_url=CLIENT, pid=1)
    (tmp_path / "mesh.json").write_bytes(msgspec.json.encode(mesh))
    return tmp_path


def test_a_running_mesh_is_found_by_its_data_directory(data: Path) -> None:
    """Both users and the bridge."""
    assert _attached("", "", [], data) == {
        "nats_url": CLIENT,
        "control_nats_url": CONTROL,
        "bridges": ("http://127.0.0.1:2",),
    }


def test_what_is_given_comes_first(data: Path) -> None:
    """Another broker, and bridges of it."""
    found = _attached("nats://x@h:3", "nats://y@h:3", ["http://h:4", "http://h:5"], data)
    assert found == {
        "nats_url": "nats://x@h:3",
        "control_nats_url": "nats://y@h:3",
        "bridges": ("http://h:4", "http://h:5"),
    }


def test_no_mesh_is_said(tmp_path: Path) -> None:
    """Rather than a broker on a usual port that is somebody else's."""
    with pytest.raises(ConfigError, match="no mesh runs"):
        _attached("", "", [], tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--all, --quick or --fault"),
        (["--fault", "unplug"], "no fault is called"),
        (["--fault", "kill-decode", "--point", "nowhere"], "no point is called"),
        (["--quick", "--count", "0"], "count is 0"),
    ],
)
def test_flags_that_make_no_sense_are_one_line(flags: list[str], words: str) -> None:
    """On stderr, with the exit code of a wrong use, before anything is started."""
    ended = CliRunner().invoke(app, ["chaos", *flags])
    assert ended.exit_code == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
