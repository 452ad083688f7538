"""Which way a reader takes, and which ways a process offers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from infra.transport.handover import PoolReader, host_identity
from infra.transport.plan import SHM_ONLY, TransportPlan, plan_transports
from infra.transport.reader import KvReader
from infra.transport.shm import SharedPool
from schemas.errors import ConfigError, KvLost
from schemas.kv import KvHandle

HERE, ELSEWHERE = f"shm://{host_identity()}/x", "shm://another-host.1/x"
NETWORK = "ucx://192.0.2.1:7"
HANDLE = KvHandle(
    lease_id="lease",
    secret=b"",
    owner="owner",
    fingerprint="f",
    num_tokens=1,
    blocks=b"",
    generations=b"",
    checksums=b"",
    addresses=(),
    expires_unix_ms=0,
)


class Remote:
    """Notes what it is asked to read."""

    def __init__(self) -> None:
        self.read_at: list[tuple[str, float]] = []

    def read(
        self,
        address: str,
        handle: KvHandle,
        into: SharedPool,
        slots: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.read_at.append((address, timeout_s))

    def prune(self) -> None:
        self.read_at.clear()


def way(reader: KvReader, *addresses: str) -> tuple[str, str]:
    return reader.way(msgspec.structs.replace(HANDLE, addresses=addresses))


def test_memory_of_this_host_is_read_as_such() -> None:
    """Whatever other address the handle has; another host's memory never is."""
    reader = KvReader(PoolReader(), Remote())
    assert way(reader, NETWORK, ELSEWHERE, HERE) == ("shm", HERE)
    assert way(reader, ELSEWHERE, NETWORK) == ("ucx", NETWORK)
    with pytest.raises(KvLost, match="no address of owner"):
        way(reader, ELSEWHERE, "http://192.0.2.1", "")


def test_a_way_that_is_not_used_leads_nowhere() -> None:
    """Neither to whoever offers only that."""
    assert way(KvReader(None, Remote()), HERE, NETWORK) == ("ucx", NETWORK)
    with pytest.raises(KvLost):
        way(KvReader(None, Remote()), HERE)
    with pytest.raises(KvLost):
        way(KvReader(PoolReader(), None), NETWORK)


def test_a_network_is_asked_only_while_there_is_time() -> None:
    """And told how much."""
    remote = Remote()
    reader = KvReader(None, remote)
    handle = msgspec.structs.replace(HANDLE, addresses=(NETWORK,))
    with SharedPool(1, 8) as into:
        with pytest.raises(KvLost, match="no time"):
            reader.read(handle, into, [0], 0.0)
        assert not remote.read_at
        assert reader.read(handle, into, [0], math.inf) == "ucx"
        assert not reader.read_at_once(handle, into, [0])
    assert remote.read_at == [(NETWORK, math.inf)]


def test_loopback_is_the_address_of_a_ucx_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By name; by default it is used where an address was given."""
    monkeypatch.setattr("infra.transport.plan.find_spec", lambda name: name)
    assert plan_transports("auto", "", 0) == SHM_ONLY
    assert plan_transports("shm", "192.0.2.1", 9).ucx_host == ""
    given = TransportPlan(ucx_host="192.0.2.1", ucx_port=9)
    assert plan_transports("auto", "192.0.2.1", 9) == given
    assert plan_transports("shm,ucx", "192.0.2.1", 9) == given
    assert plan_transports("ucx", "", 0) == TransportPlan(shm=False, ucx_host="127.0.0.1")


def test_without_ucxx_there_is_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when an address was given; refused when UCX was asked for by name."""
    monkeypatch.setattr("infra.transport.plan.find_spec", lambda name: None)
    assert plan_transports("auto", "", 0) == SHM_ONLY
    assert plan_transports("auto", "192.0.2.1", 0) == TransportPlan(lacks_ucx=True)
    assert plan_transports("shm", "192.0.2.1", 0).lacks_ucx is False
    with pytest.raises(ConfigError, match="needs ucxx") as refused:
        plan_transports("shm,ucx", "", 0)
    assert refused.value.param == "worker.kv_transports"
