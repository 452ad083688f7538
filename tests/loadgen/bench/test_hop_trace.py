import asyncio

import msgspec
import pytest

from loadgen.bench.hop_trace import HopTraces, NoTrace
from schemas.errors import SchemaError

ID = "request-1"


def trace(point: str, monotonic_ns: int, number: int = 0, request_id: str = ID) -> bytes:
    content = {"request_id": request_id, "point": point, "number": number}
    return msgspec.msgpack.encode(content | {"monotonic_ns": monotonic_ns})


def whole(traces: HopTraces) -> None:
    traces.on_message(trace("prefill_received", 3_000_000))
    traces.on_message(trace("prefill_started", 3_700_000))
    traces.on_message(trace("token_written", 5_000_000, 0))
    traces.on_message(trace("kv_ready_published", 6_000_000))
    traces.on_message(trace("decode_received", 8_500_000))
    traces.on_message(trace("decode_started", 8_900_000))
    traces.on_message(trace("token_written", 9_000_000, 1))


async def test_hops_are_differences_of_their_two_points() -> None:
    """Client to prefill, KvReady to decode, and each delta from the writer to the client."""
    traces = HopTraces()
    hops = traces.expect(ID)
    hops.submitted_ns = 1_000_000
    hops.held_ns = {0: 5_400_000, 1: 10_000_000}
    whole(traces)
    found = await traces.wait(ID, 1.0)
    assert found.bridge_to_prefill_ms == pytest.approx(2.0)
    assert found.kv_ready_to_decode_ms == pytest.approx(2.5)
    assert found.prefill_claim_ms == pytest.approx(0.7)
    assert found.decode_claim_ms == pytest.approx(0.4)
    assert found.token_to_client_ms == pytest.approx([0.4, 1.0])


async def test_waiting_ends_with_the_last_point() -> None:
    """Traces may come after the answer's end: waiting goes on until the last one is there."""
    traces = HopTraces()
    traces.expect(ID).held_ns = {0: 1, 1: 1}
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        waiting = group.create_task(traces.wait(ID, 10.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        whole(traces)
    assert waiting.result().missing() == []


async def test_a_missing_point_is_named() -> None:
    """Workers that do not trace are found out, with the remedy in the message."""
    traces = HopTraces()
    traces.expect(ID).held_ns = {0: 1, 4: 1}
    traces.on_message(trace("prefill_received", 1))
    traces.on_message(trace("token_written", 1, 0))
    with pytest.raises(NoTrace, match=r"decode_started, token_written 4 .*MESH_TRACE_HOPS=1"):
        await traces.wait(ID, 0.01)


async def test_other_requests_and_repeats_change_nothing() -> None:
    """Only expected requests are kept, and the first time of a point counts."""
    traces = HopTraces()
    hops = traces.expect(ID)
    traces.on_message(trace("prefill_received", 1, request_id="another"))
    traces.on_message(trace("prefill_received", 2))
    traces.on_message(trace("prefill_received", 3))
    assert hops.points_ns == {"prefill_received": 2}


@pytest.mark.parametrize("data", [b"", b"\xc1", trace("nowhere", 1), msgspec.msgpack.encode({})])
def test_what_is_no_trace_is_refused(data: bytes) -> None:
    """Broken bytes, unknown points and missing fields are schema errors."""
    with pytest.raises(SchemaError):
        HopTraces().on_message(data)
