"""UCX between two hosts: network namespaces with addresses of their own, and a cable to pull."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from infra.transport.handover import host_identity
from tests.infra.transport.ucx_owners import ROOT, Child, child, owner_process

pytestmark = pytest.mark.ucx
pytest.importorskip("ucxx", reason="needs the extra ucx")

NUM_BLOCKS, BLOCK_BYTES = 24, 1 << 20
OWNER, READER = "10.203.77.1", "10.203.77.2"


def ip(*words: str) -> None:
    """Raises CalledProcessError, with what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@dataclass(frozen=True)
class Host:
    """A network namespace at one end of the cable."""

    name: str
    cable: str

    @property
    def within(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def plug(self, state: str) -> None:
        """``down`` pulls the cable, ``up`` puts it in."""
        ip("-n", self.name, "link", "set", self.cable, state)


def make_hosts(stack: contextlib.ExitStack) -> tuple[Host, Host]:
    tag = secrets.token_hex(3)
    hosts = Host(f"mesh-a-{tag}", f"ma{tag}"), Host(f"mesh-b-{tag}", f"mb{tag}")
    for host in hosts:
        ip("netns", "add", host.name)
        stack.callback(ip, "netns", "del", host.name)
    one, two = hosts
    ip("link", "add", one.cable, "type", "veth", "peer", "name", two.cable)
    for host, address in zip(hosts, (OWNER, READER), strict=True):
        ip("link", "set", host.cable, "netns", host.name)
        ip("-n", host.name, "addr", "add", f"{address}/24", "dev", host.cable)
        host.plug("up")
    return hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as stack:
        try:
            made = make_hosts(stack)
        except FileNotFoundError as error:
            pytest.skip(f"no network namespaces here: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield made


@pytest.fixture(scope="module")
def owner(hosts: tuple[Host, Host]) -> Iterator[Child]:
    with owner_process(NUM_BLOCKS, BLOCK_BYTES, OWNER, hosts[0].within) as owner:
        yield owner


@pytest.fixture(scope="module")
def guest(hosts: tuple[Host, Host]) -> Iterator[Child]:
    module = "tests.infra.transport.ucx_guest"
    with child(module, NUM_BLOCKS, BLOCK_BYTES, READER, within=hosts[1].within) as guest:
        yield guest


def begin(guest: Child, owner: Child) -> None:
    handle = owner.handle(range(NUM_BLOCKS))
    assert guest.tell("begin " + msgspec.json.encode(handle).decode()) == "begun"


def test_hosts_are_told_apart(hosts: tuple[Host, Host], owner: Child) -> None:
    """Another namespace is another host: its memory is not looked for here."""
    script = "from infra.transport.handover import host_identity; print(host_identity())"
    with subprocess.Popen(
        [*hosts[0].within, sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        there = process.communicate(timeout=60)[0].strip()
    assert there
    assert there != host_identity()
    assert owner.handle([0]).addresses[0].startswith(f"ucx://{OWNER}:")


def test_blocks_go_from_host_to_host(owner: Child, guest: Child) -> None:
    """Right ones, again and again."""
    for _ in range(2):
        begin(guest, owner)
        assert guest.tell("end") == "right"


def test_a_cut_link_ends_the_transfer(hosts: tuple[Host, Host], owner: Child, guest: Child) -> None:
    """In mid-transfer: lost within seconds, and read again when the link is back."""
    owner.tell("slow 0.05")
    begin(guest, owner)
    hosts[1].plug("down")
    try:
        assert guest.tell("end").startswith("lost: ")
    finally:
        hosts[1].plug("up")
    owner.tell("slow 0")
    begin(guest, owner)
    assert guest.tell("end") == "right"
