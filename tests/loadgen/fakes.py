"""Targets that answer without a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from loadgen.driver import Limits
from loadgen.measure import RequestResult
from loadgen.workload import LoadRequest, Workload
from schemas.tokens import Usage

WORKLOAD = Workload(model="m", input_len=4, output_len=3)


def limits(**changes: float) -> Limits:
    values = {"duration_s": 30, "num_requests": 1000, "timeout_s": 30, "drain_s": 30}
    merged = {**values, "max_in_flight": 1000, **changes}
    return Limits(
        duration_s=merged["duration_s"],
        num_requests=int(merged["num_requests"]),
        timeout_s=merged["timeout_s"],
        drain_s=merged["drain_s"],
        max_in_flight=int(merged["max_in_flight"]),
    )


@dataclass
class FakeTarget:
    """Answers once ``gate`` is open; ``fault(number)`` may name an error to raise instead."""

    fault: Callable[[int], Exception | None] = lambda number: None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    numbers: list[int] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0
    num_cancelled: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def run(self, request: LoadRequest, result: RequestResult) -> None:
        self.numbers.append(request.number)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        async with self.arrived:
            self.arrived.notify_all()
        try:
            result.add_event(time.monotonic())
            await self.gate.wait()
            error = self.fault(request.number)
            if error is not None:
                raise error
            for _ in range(request.output_len - 1):
                await asyncio.sleep(0)
                result.add_event(time.monotonic())
            usage = Usage(prompt_tokens=4, completion_tokens=request.output_len)
            result.complete(usage, is_count_exact=True)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so()`` holds at the arrival of a request."""
        async with self.arrived:
            await self.arrived.wait_for(is_so)

    async def until_running(self, count: int) -> None:
        await self.until(lambda: self.num_running >= count)
