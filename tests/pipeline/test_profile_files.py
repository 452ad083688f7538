from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cost_model import FREE
from pipeline.profile_files import (
    find_profile,
    format_profile,
    is_file_name,
    parse_profile,
    read_profile,
    shipped_profiles,
)
from schemas.errors import ConfigError
from schemas.profiles import StepCosts, WorkerProfile

COSTS = StepCosts(
    prefill_base_ms=1.0,
    prefill_token_ms=0.5,
    prefill_square_ms=1e-7,
    decode_base_ms=8.0,
    decode_context_ms=1e-4,
    decode_sequence_ms=2.0,
)
TEXT = """\
kv_tokens = 4096
[costs]
prefill_base_ms = 1
prefill_token_ms = 0.5
prefill_square_ms = 1e-7
decode_base_ms = 8.0
decode_context_ms = 0.0001
decode_sequence_ms = 2.0
"""
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(texts.filter(str.strip), texts, texts, st.floats(0, 1e6), st.integers(0, 2**40))
def test_what_is_written_is_read_back(
    name: str, hardware: str, source: str, ms: float, kv_tokens: int
) -> None:
    """Whatever the texts and figures are."""
    profile = WorkerProfile(
        name=name,
        costs=StepCosts(
            prefill_base_ms=ms,
            prefill_token_ms=0.1,
            prefill_square_ms=1e-9,
            decode_base_ms=ms / 3,
            decode_context_ms=0.0,
            decode_sequence_ms=1.0,
        ),
        hardware=hardware,
        source=source,
        kv_tokens=kv_tokens,
        prefill_error=0.0123,
        measured_unix_s=1_700_000_000,
    )
    assert parse_profile(format_profile(profile), "it") == profile


def test_a_file_names_its_profile(tmp_path: Path) -> None:
    """A profile without a name is called as its file; what is left out has its default."""
    file = tmp_path / "own.toml"
    file.write_text(TEXT)
    assert read_profile(file) == WorkerProfile(name="own", costs=COSTS, kv_tokens=4096)
    assert find_profile(str(file)) == read_profile(file)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("costs = 3 = 4", "is no profile: "),
        ("[costs]\nprefill_base_ms = 1\n", "missing required field"),
        (TEXT.replace("0.5", '"fast"'), "Expected `float`"),
        (TEXT.replace("0.5", "-0.5"), "prefill_token_ms is -0.5, not a number from 0 on"),
        (TEXT.replace("0.5", "nan"), "prefill_token_ms is nan"),
        (TEXT + "decode_speed = 3\n", "unknown field `decode_speed`"),
        ("speed = 3\n" + TEXT, "unknown field `speed`"),
        (TEXT.replace("4096", "-1"), "are from 0 on"),
        ('name = " "\n' + TEXT, "it has no name"),
        ("[costs]\n" + "\n".join(f"{name} = 0" for name in FREE.__struct_fields__), "every cost"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """The error names the file and what is wrong with it."""
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_profile(file)
    assert "bad.toml" in caught.value.message
    assert caught.value.param == "worker.profile"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Nor is a directory, or what is no text, a profile."""
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for name, reason in (("no.toml", "No such file"), (".", "directory"), ("binary.toml", "UTF-8")):
        with pytest.raises(ConfigError, match=reason):
            read_profile(tmp_path / name)


def test_names_are_those_registered_and_those_shipped() -> None:
    """A registered one stands before a shipped one of its name; an unknown name lists them all."""
    own = WorkerProfile(name="h100-llama-8b", costs=COSTS)
    assert find_profile("h100-llama-8b") == shipped_profiles()["h100-llama-8b"]
    assert find_profile("h100-llama-8b", {own.name: own}) == own
    with pytest.raises(ConfigError, match=r"'h100'; there are a100-llama-70b-tp4, .*mine, and fil"):
        find_profile("h100", {"mine": own})


def test_a_file_is_told_by_its_name() -> None:
    """A slash, or the ending: nothing else is looked for on disk."""
    assert [is_file_name(one) for one in ("a.toml", "./a", "h100-8b", "m@r.native bf16.cpu")] == [
        True,
        True,
        False,
        False,
    ]
