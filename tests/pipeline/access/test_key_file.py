"""The file of keys: read, named where it is wrong, extended, revoked."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.api_key import hash_of
from pipeline.access.key import ApiKey
from pipeline.access.key_file import append_key, entry_of, parse_keys, read_keys, revoke_key
from schemas.errors import ConfigError
from tests.pipeline.access.conftest import key

HEX = "ab" * 32
FILE = f"""# ours
[keys.acme-1]
sha256 = "{HEX}"
tenant = "acme"
models = ["llama", "qwen*"]
requests_per_minute = 60
tokens_per_minute = 100_000
concurrent_requests = 8
priority = -1
max_priority = 2
expires = 2027-01-01T00:00:00Z

# the other tenant
[keys."bob"]  # Bob
sha256 = "{"cd" * 32}"
tenant = "bob"
expires = 2027-01-01
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    """Every field, and defaults where there is none."""
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    acme, bob = read_keys(path)
    assert acme == ApiKey(
        name="acme-1",
        digest=bytes.fromhex(HEX),
        tenant="acme",
        models=("llama", "qwen*"),
        requests_per_minute=60,
        tokens_per_minute=100_000,
        concurrent_requests=8,
        priority=-1,
        max_priority=2,
        expires_unix_s=1_798_761_600.0,
    )
    assert (bob.models, bob.is_limited, bob.expires_unix_s) == (None, False, 1_798_761_600.0)


@pytest.mark.parametrize(
    ("text", "param", "words"),
    [
        ("[keys.a]\ntenant = 'x'", "keys.a.sha256", "missing"),
        (f"[keys.a]\nsha256 = '{HEX}'", "keys.a.tenant", "missing"),
        (f"[keys.a]\nsha256 = '{HEX}'\ntenant = 'a b'", "keys.a.tenant", "is not 1 to 40"),
        ("[keys.a]\nsha256 = 'mesh-oops'\ntenant = 'x'", "keys.a.sha256", "not the 64 hex"),
        ("[keys.a]\nrpm = 5", "keys.a.rpm", "none of sha256, tenant"),
        ("[keys.a]\nrequests_per_minute = 0", "keys.a.requests_per_minute", "0 is not from 1"),
        ("[keys.a]\ntokens_per_minute = 1.5", "keys.a.tokens_per_minute", "no whole number"),
        ("[keys.a]\nmodels = 'x'", "keys.a.models", "no list of model names"),
        ("[keys.a]\nmodels = ['']", "keys.a.models", "no text"),
        ("[keys.a]\nexpires = 'soon'", "keys.a.expires", "no date or time"),
        ("[keys.a]\nrevoked = 1", "keys.a.revoked", "neither true nor false"),
        ("[keys]\na = 5", "keys.a", "no table"),
        ("keys = 5", "keys", "are tables"),
        ("[key.a]", "key", "'key' is none of"),
        ("[keys.a", "bridge.api_keys", "is no TOML"),
        (
            f"[keys.a]\nsha256='{HEX}'\ntenant='x'\n[keys.b]\nsha256='{HEX}'\ntenant='y'",
            "keys.b.sha256",
            "keys.b is the same key as keys.a",
        ),
        (f"[keys.'a.b']\nsha256='{HEX}'\ntenant='x'", "keys.a.b", "'a.b' is not 1 to 40"),
    ],
)
def test_what_is_wrong_is_named(text: str, param: str, words: str) -> None:
    """The field's path, and why; no half of a file counts."""
    with pytest.raises(ConfigError) as caught:
        parse_keys(text.encode(), "keys.toml")
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.message.startswith("keys.toml")


@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_a_config_error(data: bytes) -> None:
    """Whatever stands in the file."""
    with contextlib.suppress(ConfigError):
        parse_keys(data, "f")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(ConfigError, match=r"none\.toml") as caught:
        read_keys(tmp_path / "none.toml")
    assert caught.value.param == "bridge.api_keys"


@given(
    models=st.none() | st.lists(st.text(min_size=1), min_size=1, max_size=3),
    numbers=st.tuples(*[st.none() | st.integers(1, 10**9)] * 3),
    priority=st.integers(-5, 5),
    ceiling=st.none() | st.integers(-5, 5),
    expires=st.none() | st.integers(0, 4 * 10**9),
    is_revoked=st.booleans(),
)
def test_an_entry_reads_back(
    models: list[str] | None,
    numbers: tuple[int | None, int | None, int | None],
    priority: int,
    ceiling: int | None,
    expires: int | None,
    is_revoked: bool,
) -> None:
    """What is written is the key that was meant."""
    usable = [one.strip() for one in models or () if one.strip() and one.isprintable()]
    made = key(
        models=tuple(usable) or None,
        requests_per_minute=numbers[0],
        tokens_per_minute=numbers[1],
        concurrent_requests=numbers[2],
        priority=priority,
        max_priority=ceiling,
        expires_unix_s=expires,
        is_revoked=is_revoked,
    )
    assert parse_keys(entry_of(made).encode(), "f") == (made,)


def test_a_key_is_appended(tmp_path: Path) -> None:
    """Behind what is there, which stays as it is; a new file is its owner's alone."""
    path = tmp_path / "keys.toml"
    append_key(path, key())
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    path.write_text(FILE.rstrip("\n"))
    append_key(path, key(name="new"))
    assert path.read_text().startswith(FILE.rstrip("\n") + "\n\n[keys.new]\n")
    assert [one.name for one in read_keys(path)] == ["acme-1", "bob", "new"]
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ConfigError, match="has a key new already"):
        append_key(path, key(name="new", digest=hash_of(b"other")))
    with pytest.raises(ConfigError, match="is the same key"):
        append_key(path, key(name="twin"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["keys.toml"]


@pytest.mark.parametrize("name", ["acme-1", "bob"])
def test_a_key_is_revoked_and_nothing_else_changes(tmp_path: Path, name: str) -> None:
    """One line under its header; a second time changes nothing."""
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    revoke_key(path, name)
    once = path.read_text()
    assert once.replace("revoked = true\n", "", 1) == FILE
    assert {one.name: one.is_revoked for one in read_keys(path)} == {
        "acme-1": name == "acme-1",
        "bob": name == "bob",
    }
    revoke_key(path, name)
    assert path.read_text() == once


@pytest.mark.parametrize(
    "text",
    [
        f"keys.a = {{sha256 = '{HEX}', tenant = 'x'}}",
        f"[keys.a]\nrevoked = false\nsha256 = '{HEX}'\ntenant = 'x'",
        f"[keys]\na.sha256 = '{HEX}'\na.tenant = 'x'",
        f"[keys.a]\nsha256 = '{HEX}'\ntenant = 'x'\n[keys.b]\nsha256='{'0' * 64}'\ntenant='''\n"
        "[keys.c]\n'''",
    ],
)
def test_what_only_a_person_can_change_is_left_alone(tmp_path: Path, text: str) -> None:
    """The file stays as it was, and the error says what to do."""
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        revoke_key(path, "a")
    assert path.read_text() == text


def test_a_key_that_is_not_there_cant_be_revoked(tmp_path: Path) -> None:
    """The name is repeated."""
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match="has no key carol"):
        revoke_key(path, "carol")


def test_a_key_has_states_models_and_a_ceiling() -> None:
    """Expired from the moment on, revoked for good; a beginning with ``*``; never above the top."""
    mine = key(expires_unix_s=100.0, models=("a", "b/*"), priority=1, max_priority=3)
    assert [mine.state(99.9), mine.state(100.0)] == ["valid", "expired"]
    assert key(is_revoked=True).state(0) == "revoked"
    wanted = ["a", "ab", "b/x", "b"]
    assert [mine.may_use(one) for one in wanted] == [True, False, True, False]
    assert [mine.priority_of(asked) for asked in (None, 2, 9, -4)] == [1, 2, 3, -4]
    assert [key().priority_of(asked) for asked in (None, 2, -4)] == [0, 0, -4]
