"""Settings: where values come from, and what is said about those that can't be used."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.config import (
    BridgeConfig,
    BusConfig,
    ControlConfig,
    UpConfig,
    WorkerConfig,
    load_up,
    num_cores,
)
from infra.mesh_file import RunningMesh, mesh_file
from infra.parse import (
    ModelSource,
    memory_bytes,
    memory_limit_bytes,
    model,
    models,
    number,
    path,
    size_bytes,
    whole,
)
from infra.settings import TABLES, Configured, Sources, flags_of, load, settings_of, variable
from schemas.errors import ConfigError

ROLES: tuple[type[Configured], ...] = (BusConfig, ControlConfig, WorkerConfig, BridgeConfig)


def from_toml(folder: Path, text: str) -> Path:
    file = folder / "mesh.toml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    """The last of default, file, environment, flag wins, for each setting on its own."""
    file = from_toml(
        tmp_path,
        "[bridge]\nport = 1\nhost = '127.0.0.3'\nmax_open_requests = 7\n[mesh]\ndata = '/d'",
    )
    env = {"MESH_BRIDGE_PORT": "2", "MESH_BRIDGE_HOST": "127.0.0.2", "MESH_DATA": "/e"}
    sources = Sources.gather(file=file, env=env, flags={"port": "3", "host": None})
    config = load(BridgeConfig, sources)
    assert config.port == 3
    assert config.host == "127.0.0.2"
    assert config.max_open_requests == 7
    assert config.name == "bridge"
    assert config.bus.data == Path("/e")


def test_every_table_has_a_configuration() -> None:
    """A table that the file may have is one that some role reads."""
    assert {kind.table for kind in (*ROLES, UpConfig)} == set(TABLES)


@pytest.mark.parametrize(
    ("flags", "key", "words"),
    [
        ({"port": "x"}, "bridge.port", "--port: 'x' is no whole number"),
        ({"port": "65536"}, "bridge.port", "--port: 65536 is not from 0 to 65535"),
        ({"max_body_bytes": "4 apples"}, "bridge.max_body_bytes", "--max-body-bytes: '4 apples'"),
        ({"name": "a.b"}, "bridge.name", "--name: 'a.b' is not"),
        ({"log_level": "loud"}, "mesh.log_level", "--log-level: 'loud' is none of debug, info"),
    ],
)
def test_a_bad_flag_is_named(flags: dict[str, object], key: str, words: str) -> None:
    """The error names the key and the flag that it came from."""
    with pytest.raises(ConfigError) as caught:
        load(BridgeConfig, Sources.gather(env={}, flags=flags))
    assert caught.value.param == key
    assert caught.value.message.startswith(words)


def test_a_bad_variable_is_named() -> None:
    """The error names the environment variable."""
    with pytest.raises(ConfigError, match="MESH_WORKER_ENGINE: 'magic' is none") as caught:
        load(WorkerConfig, Sources.gather(env={"MESH_WORKER_ENGINE": "magic"}))
    assert caught.value.param == "worker.engine"


def test_a_bad_value_in_the_file_is_named(tmp_path: Path) -> None:
    """The error names file and key; a TOML type that does not fit is no crash."""
    file = from_toml(tmp_path, "[worker]\nthreads = 1.5")
    with pytest.raises(ConfigError, match=r"mesh\.toml: worker\.threads: 1\.5 is no whole number"):
        load(WorkerConfig, Sources.gather(file=file, env={}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[worker]\nkv_memroy = '1GB'", r"\[worker\] has no setting 'kv_memroy'"),
        ("[wroker]\nname = 'a'", r"\[wroker\] is none of the tables"),
        ("port = 1", r"\[port\] is none of the tables"),
        ("[worker", "is no TOML"),
    ],
)
def test_what_the_file_may_not_hold_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    """A typing mistake in a file is said, not ignored."""
    with pytest.raises(ConfigError, match=words):
        load(WorkerConfig, Sources.gather(file=from_toml(tmp_path, text), env={}))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """--config with a wrong path does not fall back to defaults."""
    with pytest.raises(ConfigError, match="can't read") as caught:
        Sources.gather(file=tmp_path / "none.toml", env={})
    assert caught.value.param == "--config"


def test_a_variable_of_a_role_that_has_no_such_setting_is_an_error() -> None:
    """A typing mistake in MESH_WORKER_… is said, not ignored."""
    with pytest.raises(ConfigError, match="MESH_WORKER_DTPYE"):
        load(WorkerConfig, Sources.gather(env={"MESH_WORKER_DTPYE": "fp32"}))


def test_up_takes_the_tables_of_all_roles(tmp_path: Path) -> None:
    """One file configures a whole mesh, and `mesh up`'s flags reach the roles."""
    file = from_toml(tmp_path, "[up]\nboth = 2\n[worker]\ndtype = 'fp32'\n[control]\nname = 'c7'\n")
    config = load_up(file=file, env={}, flags={"port": "0", "models": ["a=/m", "b=/n"]})
    assert (config.num_prefill, config.num_decode, config.both) == (0, 0, 2)
    assert config.num_workers == 4
    assert config.worker.dtype == "fp32"
    assert config.control.name == "c7"
    assert config.bridge.port == 0
    assert config.models == (ModelSource("a", "/m"), ModelSource("b", "/n"))


def test_up_without_settings_is_one_prefill_and_one_decode_worker() -> None:
    """What the README promises for `mesh up` without flags."""
    config = load_up(env={})
    assert (config.num_prefill, config.num_decode, config.both) == (1, 1, 0)
    assert config.controls == 2
    assert config.models == (ModelSource("smollm2-135m", "smollm2-135m"),)
    assert config.worker.dtype == "auto"
    assert config.worker.kv_memory == 2**30


def test_up_shares_the_cores_between_its_workers() -> None:
    """Workers of one machine do not each take all cores, unless somebody says so."""
    assert load_up(env={}, flags={"both": "1"}).worker.threads == num_cores()
    assert load_up(env={}, flags={"both": "64"}).worker.threads == max(1, num_cores() // 64)
    assert load_up(env={"MESH_WORKER_THREADS": "7"}, flags={"both": "64"}).worker.threads == 7


@pytest.mark.parametrize("flags", [{"prefill": "0"}, {"decode": "0"}])
def test_up_refuses_a_mesh_without_a_role(flags: dict[str, object]) -> None:
    """A mesh in which requests would wait for ever does not start."""
    with pytest.raises(ConfigError, match="no worker would do"):
        load_up(env={}, flags=flags)


def test_settings_that_contradict_each_other_are_refused() -> None:
    """A decode step must fit in a batch."""
    with pytest.raises(ConfigError, match="a decode step would not fit"):
        load(WorkerConfig, Sources.gather(env={}, flags={"max_batch_tokens": "16"}))


@given(
    port=st.integers(0, 65535),
    data=st.text("ab/ =-,", min_size=1).filter(str.strip).map(lambda s: "/" + s.strip()),
    scale=st.floats(0.05, 100),
)
def test_flags_give_the_same_configuration_again(port: int, data: str, scale: float) -> None:
    """What `mesh up` writes on a child's command line is what it meant."""
    flags = {"port": str(port), "data": data, "time_scale": str(scale)}
    meant = load(BridgeConfig, Sources.gather(env={}, flags=flags))
    assert load(BridgeConfig, Sources.gather(env={}, flags=_parse(meant))) == meant


def test_flags_of_models_give_the_same_models_again() -> None:
    """Several models, and a source that holds an equals sign."""
    meant = load(ControlConfig, Sources.gather(env={}, flags={"models": ["a=/x=y", "b"]}))
    assert load(ControlConfig, Sources.gather(env={}, flags=_parse(meant))) == meant


def _parse(config: Configured) -> dict[str, object]:
    """The command line of ``config`` as typer would hand it over."""
    names = {
        found.flag: (one.name, found.many)
        for kind in (type(config), BusConfig)
        for one, found in settings_of(kind)
    }
    flags: dict[str, object] = {}
    for given_flag in flags_of(config):
        flag, _, value = given_flag.partition("=")
        name, many = names[flag]
        if many:
            value_list = flags.setdefault(name, [])
            assert isinstance(value_list, list)
            value_list.append(value)
        else:
            flags[name] = value
    return flags


def test_a_password_stands_on_no_command_line() -> None:
    """Others can read a command line; the broker URL goes by the environment."""
    config = load(BridgeConfig, Sources.gather(env={"MESH_NATS_URL": "nats://u:secret@h"}))
    assert config.bus.nats_url == "nats://u:secret@h"
    assert "secret" not in " ".join(flags_of(config))


def test_names_are_unambiguous() -> None:
    """Within a role and the shared table no two settings share flag or variable."""
    for kind in (ControlConfig, WorkerConfig, BridgeConfig, UpConfig):
        found = [(kind.table, one, s) for one, s in settings_of(kind)]
        found += [(BusConfig.table, one, s) for one, s in settings_of(BusConfig)]
        flags = [s.flag for _, _, s in found]
        variables = [variable(table, one.name) for table, one, _ in found]
        assert len(set(flags)) == len(flags)
        assert len(set(variables)) == len(variables)


def test_a_configuration_can_be_made_directly() -> None:
    """Every setting has a default that passes its own parser."""
    for kind in ROLES:
        config = kind() if kind is BusConfig else kind(bus=BusConfig())
        for one, found in settings_of(kind):
            value = getattr(config, one.name)
            if value not in ("", -1, None):  # "not given", which nobody can give
                assert found.parse(value if found.many else str(value)) == value, one.name


def test_configurations_are_frozen() -> None:
    """Nobody changes a configuration after it was checked."""
    config = BusConfig()
    with pytest.raises(AttributeError):
        config.log_level = "debug"  # type: ignore[misc]
    assert {one.name for one in fields(config)} >= {"nats_url", "data"}


# -- the bus's URL -----------------------------------------------------------------------------


def test_the_url_is_found_beside_the_data(tmp_path: Path) -> None:
    """A role takes its own line of bus.env, else the client's."""
    (tmp_path / "bus.env").write_text(
        "# made by mesh up\nNATS_URL=nats://client:a@h:1\nMESH_NATS_URL_WORKER=nats://worker:b@h:1\n"
    )
    bus = BusConfig(data=tmp_path)
    assert bus.url("worker") == "nats://worker:b@h:1"
    assert bus.url("client") == "nats://client:a@h:1"
    assert BusConfig(data=tmp_path, nats_url="nats://x").url("worker") == "nats://x"


def test_the_url_of_a_mesh_on_another_broker_is_found(tmp_path: Path) -> None:
    """`mesh up --nats URL` has no bus.env; its mesh.json says where it is."""
    mesh = RunningMesh(url="http://h:1", nats_url="nats://elsewhere", pid=1)
    with mesh_file(tmp_path, mesh):
        assert BusConfig(data=tmp_path).url("client") == "nats://elsewhere"
    with pytest.raises(ConfigError):
        BusConfig(data=tmp_path).url("client")


def test_without_a_mesh_the_error_says_what_to_do(tmp_path: Path) -> None:
    """No bus.env and no --nats: the message names both ways out."""
    with pytest.raises(ConfigError, match=r"no mesh runs in .*'mesh up'.*--nats") as caught:
        BusConfig(data=tmp_path).url("client")
    assert caught.value.param == "mesh.nats_url"


# -- parsers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 2**20), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), (5, 5)],
)
def test_sizes(text: object, size: int) -> None:
    """GB is 10^9 bytes, GiB is 2^30; a number is bytes."""
    assert size_bytes(1)(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 apple", "nan", True, "0"])
def test_what_is_no_size(text: object) -> None:
    """Refused, with a ValueError and no other exception."""
    with pytest.raises(ValueError, match=r"size|less"):
        size_bytes(1)(text)


def test_a_share_of_memory() -> None:
    """A percentage is of what this process may use; anything else is a size."""
    assert memory_bytes(1)(" 25% ") == memory_limit_bytes() // 4
    assert memory_bytes(1)("2GB") == 2 * 10**9
    assert memory_bytes(0)("0") == memory_bytes(0)("0%") == 0
    for text in ("101%", "-1%", "%", "nan%"):
        with pytest.raises(ValueError, match="share"):
            memory_bytes(1)(text)
    with pytest.raises(ValueError, match="less"):
        memory_bytes(2**60)("100%")


@given(st.text())
def test_parsers_raise_nothing_but_value_errors(text: str) -> None:
    """Whatever a user types becomes a value or a reason."""
    for parse in (whole(0, 9), number(0, 9), size_bytes(1), memory_bytes(1), path, model, models):
        with contextlib.suppress(ValueError):
            assert parse(text) is not None


def test_models_by_table_list_and_text() -> None:
    """The three ways to write models in a file and in the environment mean the same."""
    wanted = (ModelSource("a", "/x"), ModelSource("b", "b"))
    assert models({"a": "/x", "b": "b"}) == models(["a=/x", "b"]) == models("a=/x,b") == wanted
    with pytest.raises(ValueError, match="twice"):
        models("a=/x,a=/y")
