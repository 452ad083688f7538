"""Fleet files: what they say, and what they are told when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen import scenarios
from loadgen.simulate.fleet_plan import read_fleet
from schemas.errors import ConfigError

_COSTS = (
    "{ prefill_base_ms = 1, prefill_token_ms = 0.1, prefill_square_ms = 0, "
    "decode_base_ms = 5, decode_context_ms = 0.001, decode_sequence_ms = 0.1 }"
)
_GOOD = f"""
model = "m"
[[workers]]
name = "w"
role = "both"
count = 3
costs = {_COSTS}
kv_tokens = 4096
racks = ["a", "b"]
per_host = 2
speed = 2.0
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_a_group_is_as_many_workers_each_in_its_place(tmp_path: Path) -> None:
    """Workers of a group are numbered, stand in hosts and racks by turns, and are as fast as said:
    twice the speed is half the time."""
    plan = read_fleet(_file(tmp_path, _GOOD))
    specs = plan.specs()
    assert plan.name == "fleet"
    assert [spec.name for spec in specs] == ["w-0", "w-1", "w-2"]
    assert [spec.rack for spec in specs] == ["a", "b", "a"]
    assert [spec.host for spec in specs] == ["w-host-0", "w-host-0", "w-host-1"]
    assert specs[0].costs.decode_base_ms == 2.5
    assert specs[0].queues == ("prefill", "decode")


def test_a_profile_says_what_the_group_does_not(tmp_path: Path) -> None:
    """A shipped profile gives costs and memory; what the group says itself goes before it."""
    text = '[[workers]]\nname = "w"\nrole = "both"\nprofile = "h100-llama-8b"\nkv_tokens = 999\n'
    (spec,) = read_fleet(_file(tmp_path, text)).specs()
    assert spec.kv_tokens == 999
    assert spec.kv_token_bytes > 0
    assert spec.costs.prefill_token_ms > 0


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("count = 3", 'count = "3"', "$.workers[0].count"),
        ("count = 3", "count = 0", "$.workers[0].count"),
        ("count = 3", "cuont = 3", "cuont"),
        ('role = "both"', 'role = "chef"', "$.workers[0].role"),
        ('role = "both"', 'role = "prefill"', "nobody has the role decode"),
        ("kv_tokens = 4096", "", "$.workers[0].kv_tokens"),
        ("kv_tokens = 4096", "kv_tokens = -1", "$.workers[0].kv_tokens"),
        ("speed = 2.0", "speed = 0", "$.workers[0].speed"),
        ("speed = 2.0", 'profile = "x"', "$.workers[0].profile"),
        ("decode_base_ms = 5", "decode_base_ms = -5", "$.workers[0].costs.decode_base_ms"),
        ("decode_base_ms = 5, ", "", "decode_base_ms"),
        ('name = "w"', 'name = "a.b"', "$.workers[0].name"),
        ("per_host = 2", "from_s = 5\nuntil_s = 5", "$.workers[0].until_s"),
        ('model = "m"', "routers = 0", "$.routers"),
        ('model = "m"', "block_size = 12", "$.block_size"),
        ('model = "m"', "[links]\nrack = { gb_s = 0 }", "$.links.rack.gb_s"),
        ('model = "m"', 'policy = { placement = "best" }', "$.policy.placement"),
        ("[[workers]]", "[workers]", "$.workers"),
        ('model = "m"', "model = ", "no TOML"),
    ],
)
def test_a_wrong_file_names_its_field(tmp_path: Path, before: str, after: str, named: str) -> None:
    """Whatever is wrong is told with the file and the place in it."""
    assert before in _GOOD
    with pytest.raises(ConfigError) as raised:
        read_fleet(_file(tmp_path, _GOOD.replace(before, after)))
    assert named in raised.value.message
    assert "fleet.toml" in raised.value.message


def test_names_of_groups_are_told_apart(tmp_path: Path) -> None:
    """Two groups of one name would be two workers of one id."""
    group = _GOOD.partition("[[workers]]")[2]
    with pytest.raises(ConfigError, match=r"\$\.workers\[1\]\.name"):
        read_fleet(_file(tmp_path, f"{_GOOD}\n[[workers]]{group}"))


def test_separate_servers_have_both_roles(tmp_path: Path) -> None:
    """Behind round robin nobody hands anything over."""
    text = _GOOD.replace('model = "m"', 'router = "round-robin"')
    assert read_fleet(_file(tmp_path, text)).router == "round-robin"
    two = text.replace('role = "both"', 'role = "prefill"')
    with pytest.raises(ConfigError, match=r"\$\.workers\[0\]\.role"):
        read_fleet(_file(tmp_path, two))


def test_no_file_and_no_profile_are_told(tmp_path: Path) -> None:
    """A file that is not there, and a profile that there is not."""
    with pytest.raises(ConfigError, match="can't be read"):
        read_fleet(tmp_path / "none.toml")
    text = _GOOD.replace(f"costs = {_COSTS}", 'profile = "no-such"')
    with pytest.raises(ConfigError, match="no-such"):
        read_fleet(_file(tmp_path, text)).specs()


@pytest.mark.parametrize("name", scenarios.names("fleets"))
def test_the_scenarios_fleets_can_be_read(name: str) -> None:
    """Each shipped fleet is one."""
    assert read_fleet(scenarios.fleet_file(name)).specs()
