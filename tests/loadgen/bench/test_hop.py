import json
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loadgen.bench.hop import HopSettings, make_result, run_one
from loadgen.bench.hop_trace import HopTraces, RequestHops
from loadgen.machine import MachineNote
from schemas.errors import ConfigError
from schemas.requests import InferenceRequest
from schemas.tokens import TokenDelta

GOOD: dict[str, Any] = {
    "nats_url": "",
    "trace_nats_url": "",
    "model": "m",
    "num_requests": 3,
    "num_warmup": 0,
    "input_len": 4,
    "output_len": 3,
}


class TracingMesh:
    """Stands for client and workers: each answer comes with the traces of its hops."""

    def __init__(self, traces: HopTraces) -> None:
        self.traces = traces
        self.bus = SimpleNamespace(now_unix_ms=lambda: 1000)
        self.request: InferenceRequest | None = None
        self.pending: list[list[TokenDelta]] = []

    async def submit(self, request: InferenceRequest) -> "TracingMesh":
        self.request = request
        self._tell("prefill_received")
        self._tell("prefill_started")
        self._tell("token_written", 0)
        self._tell("kv_ready_published")
        self._tell("decode_received")
        self._tell("decode_started")
        self._tell("token_written", 1)
        deltas = [
            TokenDelta(request_id=request.request_id, epoch=1, number=0, ids=(5,)),
            TokenDelta(request_id=request.request_id, epoch=2, number=1, ids=(6, 7)),
        ]
        self.pending = [deltas[:1], deltas[1:], []]
        return self

    async def next_deltas(self) -> list[TokenDelta]:
        return self.pending.pop(0)

    def _tell(self, point: str, number: int = 0) -> None:
        assert self.request is not None
        content = {"request_id": self.request.request_id, "point": point, "number": number}
        self.traces.on_message(
            msgspec.msgpack.encode(content | {"monotonic_ns": time.monotonic_ns()})
        )


async def test_a_request_is_followed_from_submit_to_the_last_delta() -> None:
    """All three hops are positive and no longer than the request itself took."""
    traces = HopTraces()
    mesh = TracingMesh(traces)
    request = HopSettings(**GOOD).workload.request(0)
    began_ns = time.monotonic_ns()
    hops = await run_one(mesh, traces, request)  # type: ignore[arg-type]
    took_ms = (time.monotonic_ns() - began_ns) / 1e6
    assert mesh.request is not None
    assert mesh.request.request_id == request.request_id
    assert mesh.request.deadline_unix_ms > 1000
    for hop_ms in (hops.bridge_to_prefill_ms, hops.kv_ready_to_decode_ms, *hops.token_to_client_ms):
        assert 0 < hop_ms <= took_ms
    assert len(hops.token_to_client_ms) == 2


def test_json_has_the_three_hops_their_sum_and_the_noise() -> None:
    """The keys that others read: p50 and p99 per hop, and how busy the machine was."""
    hops = [
        RequestHops(
            submitted_ns=0,
            held_ns={0: 10_000_000 + n, 1: 13_000_000},
            written_ns={0: 9_000_000, 1: 12_000_000},
            points_ns={
                "prefill_received": 2_000_000,
                "prefill_started": 2_750_000,
                "kv_ready_published": 5_000_000,
                "decode_received": 6_500_000,
                "decode_started": 7_000_000,
            },
        )
        for n in range(3)
    ]
    result = make_result(HopSettings(**GOOD), hops, MachineNote.now())
    content = json.loads(result.to_json())
    assert content["bridge_to_prefill_ms"] == {"p50": 2.0, "p99": 2.0}
    assert content["kv_ready_to_decode_ms"] == {"p50": 1.5, "p99": 1.5}
    assert content["prefill_claim_ms"]["p50"] == 0.75
    assert content["decode_claim_ms"]["p50"] == 0.5
    assert content["token_to_client_ms"]["p50"] == pytest.approx(1.0, abs=1e-3)
    assert content["sum_of_p50_ms"] == pytest.approx(4.5, abs=1e-3)
    assert content["num_requests"] == 3
    assert content["noise"]["num_cores"] >= 1
    assert any("simulated" in note for note in content["notes"])


@pytest.mark.parametrize(
    "change", [{"num_requests": 0}, {"num_warmup": -1}, {"output_len": 1}, {"input_len": 0}]
)
def test_numbers_out_of_range_are_refused(change: dict[str, int]) -> None:
    """One token, for instance, would never be handed to decode."""
    with pytest.raises(ConfigError):
        HopSettings(**(GOOD | change))
