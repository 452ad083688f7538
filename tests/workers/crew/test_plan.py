"""The file of a crew."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from pipeline.cost_model import FREE
from schemas.errors import ConfigError
from workers.crew.plan import MAX_CREW, Crew, CrewWorker, read_crew, write_crew

WORKER = CrewWorker(name="p-1", role="prefill", costs=FREE, num_blocks=64, rack="r1")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Every field comes back."""
    crew = (WORKER, msgspec.structs.replace(WORKER, name="d-1", role="decode", zone="z"))
    write_crew(crew, tmp_path / "crew.json")
    assert read_crew(tmp_path / "crew.json") == crew


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "a b"}, "$.workers[0].name"),
        ({"num_blocks": 0}, "$.workers[0].num_blocks"),
        ({"max_num_sequences": 0}, "$.workers[0].max_num_sequences"),
        ({"max_num_sequences": 600}, "$.workers[0].max_batch_tokens"),
        ({"kv_token_bytes": -1}, "$.workers[0].kv_token_bytes"),
        (
            {"costs": msgspec.structs.replace(FREE, decode_base_ms=-1.0)},
            "$.workers[0].costs.decode_base_ms",
        ),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], complaint: str) -> None:
    """File, worker and field."""
    path = tmp_path / "crew.json"
    write_crew((msgspec.structs.replace(WORKER, **changes),), path)
    with pytest.raises(ConfigError) as caught:
        read_crew(path)
    assert complaint in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.param == "worker.crew"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"nonsense", "malformed"),
        (b'{"workers": []}', "0 workers"),
        (b'{"workers": [{"name": "x"}]}', "$.workers[0]"),
        (b'{"workers": [], "speed": 2}', "speed"),
    ],
)
def test_what_is_no_crew_is_refused(tmp_path: Path, text: bytes, complaint: str) -> None:
    """Bad JSON, nobody, a field that lacks, one that nobody knows."""
    path = tmp_path / "crew.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        read_crew(path)


def test_names_are_unique_and_the_process_has_a_limit(tmp_path: Path) -> None:
    """Two workers of one name would have one id."""
    path = tmp_path / "crew.json"
    write_crew((WORKER, WORKER), path)
    with pytest.raises(ConfigError, match="there twice"):
        read_crew(path)
    many = tuple(
        msgspec.structs.replace(WORKER, name=f"p-{number}") for number in range(MAX_CREW + 1)
    )
    path.write_bytes(msgspec.json.encode(Crew(workers=many)))
    with pytest.raises(ConfigError, match="1025 workers"):
        read_crew(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As any other setting that can't be used."""
    with pytest.raises(ConfigError, match="No such file"):
        read_crew(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="can't be written"):
        write_crew((WORKER,), tmp_path / "none" / "crew.json")
