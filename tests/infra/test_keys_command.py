"""``mesh keys`` as it is typed, and who may leave keys out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from infra import cli
from infra.access_config import is_loopback
from infra.api_key import hash_of
from infra.config import BridgeConfig, UpConfig, load_up
from infra.parse import ModelSource
from infra.settings import Sources, flags_of, load, secrets_of
from infra.up_plan import plan
from pipeline.access.key_file import parse_keys, read_keys
from schemas.errors import ConfigError
from schemas.requests import Slo

KEY = "mesh-0123456789abcdef0123456789"


class Typed:
    """What a command printed, and how it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out = self.err = ""

    def __call__(self, *words: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["mesh", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        self.out, self.err = self._capsys.readouterr()
        return int(ended.value.code or 0)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


def test_a_new_key_is_printed_with_its_entry(typed: Typed) -> None:
    """Once, in clear; the entry has its hash and nothing but what was asked for."""
    assert typed("keys", "new", "--tenant", "acme") == 0
    key, entry = typed.out.split("\n\n", 1)
    (made,) = parse_keys(entry.encode(), "printed")
    assert made.digest == hash_of(key.encode())
    assert (made.tenant, made.is_limited, made.models) == ("acme", False, None)
    assert made.name.startswith("acme-")
    assert key not in entry


def test_a_new_key_goes_into_a_file(typed: Typed, tmp_path: Path) -> None:
    """The key alone on stdout, for a script; every option in the entry."""
    path = tmp_path / "keys.toml"
    options = (
        "--name=prod", "--models=a,b*", "--rpm=60", "--tpm=100000", "--concurrency=8",
        "--priority=1", "--max-priority=3", "--expires=2027-01-01", f"--file={path}",
        "--ttft-ms=300", "--tbt-ms=12.5", "--slo-class=gold",
    )  # fmt: skip
    assert typed("keys", "new", "--tenant=acme", *options) == 0
    key = typed.out.removesuffix("\n")
    (made,) = read_keys(path)
    assert made.digest == hash_of(key.encode())
    assert (made.name, made.models, made.priority, made.max_priority) == ("prod", ("a", "b*"), 1, 3)
    limits = (made.requests_per_minute, made.tokens_per_minute, made.concurrent_requests)
    assert limits == (60, 100_000, 8)
    assert made.slo == Slo(ttft_ms=300.0, tbt_ms=12.5, name="gold")
    assert made.expires_unix_s == 1_798_761_600.0
    assert key not in path.read_text() + typed.err


def test_keys_are_listed_and_revoked(typed: Typed, tmp_path: Path) -> None:
    """For people in whole names however wide the terminal is, and as JSON."""
    path = tmp_path / "keys.toml"
    long = "a-name-that-is-as-long-as-a-name-can-be1"
    typed("keys", "new", "--tenant=acme", f"--name={long}", "--rpm=60", f"--file={path}")
    assert typed("keys", "list", path) == 0
    header, row = typed.out.splitlines()
    assert header.split() == [
        "name", "tenant", "state", "models", "rpm", "tpm", "at", "once", "priority", "slo",
        "expires", "sha256",
    ]  # fmt: skip
    typed("keys", "new", "--tenant=b", "--ttft-ms=300", "--slo-class=gold", f"--file={path}")
    typed("keys", "list", path)
    assert "gold 300 ms/-" in typed.out.splitlines()[2]
    typed("keys", "list", path)
    assert row.split()[:7] == [long, "acme", "valid", "all", "60", "-", "-"]
    assert typed("keys", "revoke", path, long) == 0
    assert typed("keys", "list", path, "--json") == 0
    facts, slow = json.loads(typed.out)
    assert (slow["ttft_ms"], slow["tbt_ms"], slow["slo_class"]) == (300.0, None, "gold")
    assert (facts["name"], facts["state"], facts["requests_per_minute"]) == (long, "revoked", 60)
    path.write_text("")
    typed("keys", "list", path)
    assert typed.out == "no keys\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("new", "--tenant", "a b"), "--tenant: 'a b' is not 1 to 40"),
        (("new", "--tenant=a", "--name=x.y"), "--name: 'x.y' is not"),
        (("new", "--tenant=a", "--expires=soon"), "'soon' is no date or time like 2027-01-31"),
        (("new", "--tenant=a", "--models=a,,b"), "keys.a-"),
        (("list", "/nowhere/keys.toml"), "can't read /nowhere/keys.toml"),
        (("revoke", "/nowhere/keys.toml", "x"), "can't read /nowhere/keys.toml"),
    ],
)
def test_bad_input_is_one_line(typed: Typed, words: tuple[str, ...], said: str) -> None:
    """Which option, or which file, and why."""
    assert typed("keys", *words) != 0
    assert typed.err.startswith("mesh keys: ")
    assert said in typed.err
    assert typed.err.count("\n") == 1


@pytest.mark.parametrize("command", ["bridge", "up"])
def test_a_bad_key_file_is_told_at_once(typed: Typed, tmp_path: Path, command: str) -> None:
    """Before anything is started or a broker is looked for."""
    path = tmp_path / "keys.toml"
    path.write_text("[keys.a]\nrpm = 5")
    assert typed(command, "--api-keys", path, "--data", tmp_path) == 2
    assert "keys.a.rpm: none of sha256" in typed.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["keys.toml"]


# --- when keys are needed -----------------------------------------------------------------------


def bridge_of(**flags: object) -> BridgeConfig:
    return load(BridgeConfig, Sources.gather(env={}, flags=flags))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_a_loopback_host_needs_no_keys(host: str) -> None:
    """One machine, one developer."""
    assert is_loopback(host)
    assert not bridge_of(host=host).has_keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "mesh.example.com", "fe80::1"])
def test_any_other_host_does(host: str) -> None:
    """Unless it is said that everybody may enter; `mesh up` says the same."""
    with pytest.raises(ConfigError, match="no loopback address") as caught:
        bridge_of(host=host)
    assert caught.value.param == "bridge.api_keys"
    with pytest.raises(ConfigError, match="no loopback address"):
        load_up(env={}, flags={"host": host})
    assert not bridge_of(host=host, auth="none").has_keys
    assert bridge_of(host=host, api_key=[KEY]).has_keys
    assert bridge_of(host=host, api_keys="/k.toml").has_keys


def test_contradictions_are_refused() -> None:
    """Keys that nobody is asked for, and a demand for keys without any."""
    with pytest.raises(ConfigError, match="would let everybody in"):
        bridge_of(auth="none", api_key=[KEY])
    with pytest.raises(ConfigError, match="there are none"):
        bridge_of(auth="keys")


def test_keys_of_the_environment_reach_the_children_as_hashes() -> None:
    """In their environment: no command line and no configuration has a key in clear."""
    env = {"MESH_BRIDGE_API_KEY": f"acme={KEY},{KEY}2"}
    config: UpConfig = load_up(env=env)
    assert KEY not in repr(config)
    (bridge,) = [
        one
        for one in plan(("mesh",), config, (ModelSource("m", "/m"),), lambda role: "nats://x")
        if one.kind == "bridge"
    ]
    assert not any("api-key=" in word for word in bridge.command)
    given = bridge.env["MESH_BRIDGE_API_KEY"]
    assert KEY not in given
    assert bridge.env["MESH_NATS_URL"] == "nats://x"
    again = load(BridgeConfig, Sources.gather(env={"MESH_BRIDGE_API_KEY": given}))
    assert again.api_key == config.bridge.api_key
    assert secrets_of(again) == {"MESH_BRIDGE_API_KEY": given}
    assert flags_of(again) == flags_of(bridge_of())
