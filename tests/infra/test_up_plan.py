"""What ``mesh up`` starts."""

from __future__ import annotations

from infra.children import ChildSpec
from infra.config import load_up
from infra.parse import ModelSource
from infra.up_plan import plan

MODEL = ModelSource("m", "/m")


def planned(**flags: str) -> dict[str, ChildSpec]:
    config = load_up(env={}, flags=flags)
    specs = plan(("mesh",), config, (MODEL,), lambda role: f"nats://{role}@host")
    assert len({spec.name for spec in specs}) == len(specs)
    return {spec.name: spec for spec in specs}


def test_control_processes_have_names_of_their_own() -> None:
    """Two by default; a single one keeps its plain name."""
    assert list(planned()) == ["control-1", "control-2", "prefill-1", "decode-1", "bridge"]
    assert list(planned(controls="1", both="1")) == ["control", "both-1", "bridge"]


def test_passwords_go_by_the_environment() -> None:
    """The broker url of a role stands on no command line."""
    for spec in planned().values():
        assert spec.env["MESH_NATS_URL"] == f"nats://{spec.kind}@host"
        assert not any("nats://" in word for word in spec.command)


def test_control_processes_do_not_share_a_health_port() -> None:
    """A given port is the first one's; the next has the next."""
    config = load_up(env={"MESH_CONTROL_HEALTH_PORT": "9100"})
    specs = plan(("mesh",), config, (MODEL,), lambda role: "nats://host")
    flags = [" ".join(spec.command) for spec in specs if spec.kind == "control"]
    assert "--health-port=9100" in flags[0]
    assert "--health-port=9101" in flags[1]


def test_bridges_share_a_socket_and_nothing_else() -> None:
    """Each has a name and a health port of its own, and inherits the descriptor; none starts
    further ones."""
    config = load_up(env={"MESH_BRIDGE_HEALTH_PORT": "9100", "MESH_BRIDGE_PROCESSES": "2"})
    assert config.num_bridges == 2
    specs = plan(("mesh",), config, (MODEL,), lambda role: "nats://host", 7)
    first, second = [spec for spec in specs if spec.kind == "bridge"]
    assert (first.name, second.name) == ("bridge-1", "bridge-2")
    assert {"--health-port=9100", "--processes=1"} < set(first.command)
    assert {"--health-port=9101", "--processes=1"} < set(second.command)
    for spec in (first, second):
        assert (spec.fds, spec.env["MESH_LISTEN_FD"]) == ((7,), "7")
    assert not any(spec.fds for spec in specs if spec.kind != "bridge")


def test_a_single_bridge_binds_its_port_itself() -> None:
    """It keeps its plain name, and the port refuses while it is not there."""
    spec = planned()["bridge"]
    assert spec.fds == ()
    assert "MESH_LISTEN_FD" not in spec.env
