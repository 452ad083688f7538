"""Who is let in, and how a changed file gets to be known."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.api_key import hash_of
from infra.log import make_logger
from pipeline.access.budgets import Budgets
from pipeline.access.door import KeyDoor, OpenDoor
from pipeline.access.errors import InvalidApiKey, OverLimit, RateLimited, extra_headers
from pipeline.access.key_file import append_key, entry_of, revoke_key
from pipeline.access.permit import ANYONE, KeyPermit, MeteredPermit
from schemas.errors import ConfigError, QueueFull
from tests.pipeline.access.conftest import KEY, key

BEARER = b"Bearer " + KEY.encode()
MakeDoor = Callable[..., KeyDoor]


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def door_of(budgets: Budgets, output: io.StringIO) -> MakeDoor:
    """``door_of(path, *fixed keys)``"""

    def make(path: Path | None, *fixed: Any, **more: Any) -> KeyDoor:
        return KeyDoor(path, fixed, budgets, make_logger("test", stream=output), **more)

    return make


def events(output: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


def opens(door: KeyDoor, authorization: bytes = BEARER) -> bool:
    try:
        door.permit(authorization)
    except InvalidApiKey:
        return False
    return True


def test_a_known_key_opens(door_of: MakeDoor) -> None:
    """With its tenant and name; one with limits is counted, one without is not."""
    permit = door_of(None, key()).permit(BEARER)
    assert (permit.tenant, permit.key_name, type(permit)) == ("acme", "acme-1", KeyPermit)
    limited = door_of(None, key(requests_per_minute=1)).permit(b"bearer  " + KEY.encode() + b" ")
    assert isinstance(limited, MeteredPermit)
    assert OpenDoor().permit(None) is ANYONE


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "is needed"),
        (b"", "is needed"),
        (b"Bearer", "is needed"),
        (b"Bearer  ", "is needed"),
        (b"Basic " + KEY.encode(), "is needed"),
        (KEY.encode(), "is needed"),
        (BEARER + b"x", "not known"),
        (b"Bearer \xff\xfe", "not known"),
    ],
)
def test_anything_else_does_not(door_of: MakeDoor, given: bytes | None, words: str) -> None:
    """401, and the key is not repeated."""
    with pytest.raises(InvalidApiKey, match=words) as refused:
        door_of(None, key()).permit(given)
    assert (refused.value.http_status, refused.value.code) == (401, "invalid_api_key")
    assert KEY not in refused.value.message


def test_an_expired_or_revoked_key_says_so(door_of: MakeDoor) -> None:
    """From the moment on."""
    now = [99.0]
    door = door_of(None, key(expires_unix_s=100.0), now_unix_s=lambda: now[0])
    assert opens(door)
    now[0] = 100.0
    with pytest.raises(InvalidApiKey, match="expired"):
        door.permit(BEARER)
    with pytest.raises(InvalidApiKey, match="revoked"):
        door_of(None, key(is_revoked=True)).permit(BEARER)


def test_a_changed_file_counts(door_of: MakeDoor, tmp_path: Path, output: io.StringIO) -> None:
    """A new key opens, a revoked one closes, without a restart; each change is logged."""
    path = tmp_path / "keys.toml"
    append_key(path, key(name="first", digest=hash_of(b"other")))
    door = door_of(path)
    assert not opens(door)
    append_key(path, key())
    door.refresh()
    assert opens(door)
    revoke_key(path, "acme-1")
    door.refresh()
    door.refresh()
    assert not opens(door)
    assert [line["event"] for line in events(output)] == ["api_keys_read"] * 2


def test_a_file_that_does_not_change_is_not_read_again(
    door_of: MakeDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is old enough that its time stamp tells."""
    path = tmp_path / "keys.toml"
    append_key(path, key())
    os.utime(path, (1, 1))
    door = door_of(path)
    monkeypatch.setattr("pipeline.access.door.read_keys", lambda _: pytest.fail("read again"))
    door.refresh()


@pytest.mark.parametrize("broken", ["[keys.a]\nrpm = 1", "", None])
def test_a_bad_file_keeps_the_old_keys(
    door_of: MakeDoor, tmp_path: Path, output: io.StringIO, broken: str | None
) -> None:
    """It is logged once, with the field; mended, it counts. An empty file is no bad one."""
    path = tmp_path / "keys.toml"
    append_key(path, key())
    door = door_of(path)
    path.unlink() if broken is None else path.write_text(broken)
    door.refresh()
    door.refresh()
    assert opens(door) == (broken != "")
    if broken != "":
        (line,) = events(output)
        assert line["event"] == "api_keys_refused"
        assert line["field"] == ("keys.a.rpm" if broken else "bridge.api_keys")
    path.write_text(entry_of(key(tenant="mended")))
    door.refresh()
    assert door.permit(BEARER).tenant == "mended"


def test_a_bad_file_at_the_start_is_an_error(door_of: MakeDoor, tmp_path: Path) -> None:
    """Nothing is served with half of the keys."""
    path = tmp_path / "keys.toml"
    path.write_text("[keys.a]\ntenant = 'x'")
    with pytest.raises(ConfigError, match="sha256: missing"):
        door_of(path)


def test_the_file_says_more_of_a_key_that_both_name(door_of: MakeDoor, tmp_path: Path) -> None:
    """A key of the settings gets the limits that the file gives it."""
    path = tmp_path / "keys.toml"
    append_key(path, key(requests_per_minute=5))
    door = door_of(path, key(tenant="settings"))
    assert door.permit(BEARER).tenant == "acme"
    assert door.num_keys == 1


def test_what_clients_are_told_beside_the_status() -> None:
    """Milliseconds to wait; not to try again what never fits; the challenge of a 401."""
    assert extra_headers(RateLimited("x", retry_after_s=0.0201)) == [(b"retry-after-ms", b"21")]
    assert extra_headers(OverLimit("x")) == [(b"x-should-retry", b"false")]
    assert extra_headers(InvalidApiKey("x")) == [(b"www-authenticate", b"Bearer")]
    assert extra_headers(QueueFull("x", retry_after_s=3)) == []
