from pathlib import Path

import pytest

from infra.mesh_file import MESH_FILE, RunningMesh, mesh_file, read_mesh_file
from schemas.errors import ConfigError, SchemaError

MESH = RunningMesh(url="http://127.0.0.1:8000", nats_url="nats://u:p@127.0.0.1:4222", pid=7)


def test_the_file_is_there_for_the_block_only(tmp_path: Path) -> None:
    """It can be read back inside, by its owner alone, and nothing is left afterwards."""
    assert read_mesh_file(tmp_path) is None
    with mesh_file(tmp_path, MESH):
        assert read_mesh_file(tmp_path) == MESH
        assert (tmp_path / MESH_FILE).stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_by_a_killed_mesh_is_replaced(tmp_path: Path) -> None:
    """The new mesh's words stand there, whatever stood there before."""
    (tmp_path / MESH_FILE).write_text("{}")
    with pytest.raises(SchemaError):
        read_mesh_file(tmp_path)
    with mesh_file(tmp_path, MESH):
        assert read_mesh_file(tmp_path) == MESH


def test_a_folder_that_can_not_be_written_is_a_setting_to_mend(tmp_path: Path) -> None:
    """The error names the data directory's key."""
    with (
        pytest.raises(ConfigError) as caught,
        mesh_file(tmp_path / "missing", MESH),
    ):
        pass
    assert caught.value.param == "mesh.data"
