"""Time stamps of single hops, for ``mesh bench hop``; silent unless ``MESH_TRACE_HOPS=1``.

All processes of one host share CLOCK_MONOTONIC, so a bench can subtract what different processes
say. One core message per point on ``mesh.v1.trace.<worker>``.
"""

from __future__ import annotations

import os
import time
from typing import Literal

import msgspec

from infra.bus import Bus
from schemas.errors import BusUnavailable
from schemas.subjects import ROOT

Point = Literal[
    "prefill_received",
    "prefill_started",
    "kv_ready_published",
    "decode_received",
    "decode_started",
    "token_written",
]

VARIABLE = "MESH_TRACE_HOPS"


class HopTrace:
    """Says when a request passed a point of this worker."""

    def __init__(self, bus: Bus, worker: str) -> None:
        self._bus = bus
        self._subject = f"{ROOT}.trace.{worker}"
        self.is_on = os.environ.get(VARIABLE) == "1"

    def mark(self, request_id: str, point: Point, number: int = 0) -> None:
        """Publish the present time as that of ``point``."""
        if not self.is_on:
            return
        facts = {
            "request_id": request_id,
            "point": point,
            "number": number,
            "monotonic_ns": time.monotonic_ns(),
        }
        try:
            self._bus.say(self._subject, msgspec.msgpack.encode(facts))
        except BusUnavailable:
            return  # a bench that lost its bus has no figures anyhow
