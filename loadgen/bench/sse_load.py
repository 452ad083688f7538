"""The load of ``mesh bench stream``: a process of its own that opens event streams and counts.

    python -m loadgen.bench.sse_load        # orders in, figures out: one JSON object per line each

It parses no JSON of the answers: with hundreds of streams on a few cores whatever it spent would be
missing to the server. What it did spend stands in its figures.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Sequence

import msgspec

from loadgen.http_stream import BadHttp, HttpClient
from loadgen.loop import fast_loop

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
_CARRY = len(_EVENT) - 1  # an event may be torn by the socket's reads, and is to count once
_ANSWER_S = 120.0
_PATH = "/v1/completions"


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Send ``num_requests``, ``num_streams`` at a time.

    ``first_number`` begins each prompt's count: no two prompts have a beginning in common, as long
    as no two orders share numbers.
    """

    url: str
    model: str
    num_streams: int
    num_requests: int
    input_len: int  # words
    output_len: int  # tokens
    first_number: int = 0
    api_key: str = ""


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one order brought. Times in milliseconds; gaps are those between events of a stream."""

    num_completed: int
    num_failed: int
    num_events: int
    wall_s: float
    cpu_s: float  # of the load process itself
    ttft_ms: dict[str, float]
    gap_ms: dict[str, float]
    error: str = ""  # of one that failed


class _Stream:
    """One answer as it comes."""

    __slots__ = (
        "_end", "_gaps_s", "_last_s", "_tail", "is_done", "num_events", "num_together", "ttft_s",
    )  # fmt: skip

    def __init__(self, gaps_s: array[float]) -> None:
        self.ttft_s = 0.0
        self.num_events = 0
        self.num_together = 0  # events that came in one piece with the one before them
        self.is_done = False
        self._gaps_s = gaps_s
        self._last_s = time.perf_counter()
        self._tail = b""
        self._end = b""

    def on_body(self, status: int, body: bytes) -> None:
        if status != 200:
            self._tail = (self._tail + body)[:300]
            return
        data = self._tail + body
        count = data.count(_EVENT)
        self._tail = data[-_CARRY:]
        self._end = (self._end + body)[-len(_DONE) - 4 :]
        if count:
            now_s = time.perf_counter()
            if self.num_events:
                self._gaps_s.append(now_s - self._last_s)
            else:
                self.ttft_s = now_s - self._last_s
            self.num_events += count
            self.num_together += count - 1
            self._last_s = now_s
        if _DONE in self._end:
            self.is_done = True

    @property
    def refusal(self) -> str:
        return self._tail.decode(errors="replace")


async def run_order(order: LoadOrder) -> LoadFigures:
    """Send what ``order`` says and wait for all answers."""
    headers = {"Authorization": f"Bearer {order.api_key}"} if order.api_key else None
    client = HttpClient(order.url, headers)
    gaps_s: array[float] = array("d")
    streams: list[_Stream] = []
    numbers = iter(range(order.first_number, order.first_number + order.num_requests))
    errors: list[str] = []

    async def send_in_turn() -> None:
        for number in numbers:
            stream = _Stream(gaps_s)
            streams.append(stream)
            try:
                async with asyncio.timeout(_ANSWER_S):
                    status = await client.post(
                        "/v1/completions", _body(order, number), stream.on_body
                    )
                if not stream.is_done:
                    errors.append(f"status {status}: {stream.refusal}")
            except (OSError, BadHttp, TimeoutError) as error:
                errors.append(repr(error))

    cpu_s, begun_s = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(order.num_streams):
            tasks.create_task(send_in_turn())
    wall_s = time.perf_counter() - begun_s
    cpu_s = time.process_time() - cpu_s
    client.close()
    return LoadFigures(
        num_completed=sum(stream.is_done for stream in streams),
        num_failed=len(errors),
        num_events=sum(stream.num_events for stream in streams),
        wall_s=wall_s,
        cpu_s=cpu_s,
        ttft_ms=_spread([stream.ttft_s for stream in streams if stream.num_events]),
        gap_ms=_spread(gaps_s, num_zero=sum(stream.num_together for stream in streams)),
        error=errors[0] if errors else "",
    )


def _body(order: LoadOrder, number: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": order.model,
            "prompt": f"{number} " + " ".join(["hello"] * order.input_len),
            "max_tokens": order.output_len,
            "min_tokens": order.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
    )


def _spread(values_s: Sequence[float] | array[float], num_zero: int = 0) -> dict[str, float]:
    """Median and 99th percentile, in ms, of the values and ``num_zero`` zeros below them."""
    ordered = sorted(values_s)
    count = len(ordered) + num_zero

    def at(share: float) -> float:
        place = min(count - 1, int(count * share)) - num_zero
        return round(ordered[place] * 1e3, 3) if place >= 0 else 0.0

    return {"p50": at(0.5), "p99": at(0.99)} if ordered else {"p50": 0.0, "p99": 0.0}


def main() -> None:
    """Carry out the orders of standard input until it ends."""
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=LoadOrder)
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            figures = runner.run(run_order(order))
        sys.stdout.buffer.write(msgspec.json.encode(figures) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
