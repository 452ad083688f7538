"""The times of one request's hops, as the processes on its way tell them.

Workers started with ``MESH_TRACE_HOPS=1`` publish, at each point below, the request's id and
CLOCK_MONOTONIC, which is one clock for all processes of a host:

    prefill_received      the prefill worker has the task
    prefill_started       its engine has the request, under a claim that is stored
    kv_ready_published    the prefill worker begins to publish KvReady
    decode_received       the decode worker has the task
    decode_started        its engine has the sequence with its KV, under a claim that is stored
    token_written         a delta that begins with token ``number`` is handed to the token writer

The client adds two of its own: when it began to submit, and when it held each delta.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from schemas.errors import MeshError, SchemaError

TRACE_SUBJECTS = "mesh.v1.trace.*"
TRACE_VARIABLE = "MESH_TRACE_HOPS"

StagePoint = Literal[
    "prefill_received", "prefill_started", "kv_ready_published", "decode_received", "decode_started"
]
Point = StagePoint | Literal["token_written"]
STAGE_POINTS: tuple[StagePoint, ...] = get_args(StagePoint)


class HopEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One message on a trace subject."""

    request_id: str
    point: Point
    monotonic_ns: int
    number: int = 0  # token_written: the first token's number


class NoTrace(MeshError):
    """Trace messages that were waited for did not come."""

    code = "no_trace"


_decode = msgspec.msgpack.Decoder(HopEvent).decode


@dataclass(slots=True, kw_only=True)
class RequestHops:
    """The times of one request, in nanoseconds. A point that comes twice keeps its first time."""

    submitted_ns: int = 0
    held_ns: dict[int, int] = field(default_factory=dict)  # by a delta's first token number
    written_ns: dict[int, int] = field(default_factory=dict)  # the same numbers
    points_ns: dict[Point, int] = field(default_factory=dict)

    def add(self, event: HopEvent) -> None:
        """Take in what a worker told."""
        if event.point == "token_written":
            self.written_ns.setdefault(event.number, event.monotonic_ns)
        else:
            self.points_ns.setdefault(event.point, event.monotonic_ns)

    def missing(self) -> list[str]:
        """What has not been told yet of a request whose answer is complete."""
        stages: list[str] = [point for point in STAGE_POINTS if point not in self.points_ns]
        numbers = sorted(self.held_ns.keys() - self.written_ns.keys())
        return stages + [f"token_written {number}" for number in numbers]

    @property
    def bridge_to_prefill_ms(self) -> float:
        """Submitted by the client until the prefill worker has its task."""
        return (self.points_ns["prefill_received"] - self.submitted_ns) / 1e6

    @property
    def prefill_claim_ms(self) -> float:
        """From there until it is claimed and in the engine."""
        return (self.points_ns["prefill_started"] - self.points_ns["prefill_received"]) / 1e6

    @property
    def kv_ready_to_decode_ms(self) -> float:
        """KvReady published until the decode worker has its task."""
        points_ns = self.points_ns
        return (points_ns["decode_received"] - points_ns["kv_ready_published"]) / 1e6

    @property
    def decode_claim_ms(self) -> float:
        """From there until it is claimed, its KV copied, and the sequence in the engine."""
        return (self.points_ns["decode_started"] - self.points_ns["decode_received"]) / 1e6

    @property
    def token_to_client_ms(self) -> list[float]:
        """For each delta: handed to the token writer until the client holds it."""
        written_ns = self.written_ns
        return [(held - written_ns[number]) / 1e6 for number, held in self.held_ns.items()]


class HopTraces:
    """Collects trace messages of the requests that are expected; others are left alone."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestHops] = {}
        self._changed = asyncio.Event()

    def expect(self, request_id: str) -> RequestHops:
        """A request is about to be submitted; its times go into what is returned."""
        hops = self._requests[request_id] = RequestHops()
        return hops

    def on_message(self, data: bytes) -> None:
        """A message came on a trace subject.

        Raises:
            SchemaError: it is no trace message.
        """
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            raise SchemaError(f"no hop trace: {error}", param="$") from error
        hops = self._requests.get(event.request_id)
        if hops is not None:
            hops.add(event)
            self._changed.set()

    async def wait(self, request_id: str, timeout_s: float) -> RequestHops:
        """The times of a request whose answer is complete, once every point was told; the
        request is forgotten then.

        Raises:
            NoTrace: a point is still missing after ``timeout_s``.
        """
        hops = self._requests[request_id]
        try:
            async with asyncio.timeout(timeout_s):
                while hops.missing():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = ", ".join(hops.missing())
            raise NoTrace(
                f"no trace of {missing} within {timeout_s:g} s; workers tell their hops only when "
                f"started with {TRACE_VARIABLE}=1"
            ) from None
        del self._requests[request_id]
        return hops
