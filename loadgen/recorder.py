"""What a run has measured so far, owned by whoever reports it.

It outlives the run: one that is cancelled in the middle leaves everything behind, with the
requests that were still running as ``running``.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from loadgen.measure import RequestResult
from loadgen.workload import LoadRequest


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Results, counters for the progress bar, and the generator's own cost."""

    results: list[RequestResult] = field(default_factory=list)
    num_in_flight: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0  # of the requests that ended
    num_skipped: int = 0
    loop_lag_s: array[float] = field(default_factory=lambda: array("d"))
    started_unix_ms: int = 0
    started_s: float | None = None  # None: measuring has not begun
    ended_s: float | None = None
    _cpu_started_s: float = 0.0
    _cpu_ended_s: float = 0.0

    def start(self) -> None:
        """Measuring begins."""
        self.started_unix_ms = time.time_ns() // 1_000_000
        self._cpu_started_s = time.process_time()
        self.started_s = time.monotonic()

    def stop(self) -> None:
        """Measuring is over; requests still running stay unfinished."""
        self._cpu_ended_s = time.process_time()
        self.ended_s = time.monotonic()

    @property
    def wall_s(self) -> float:
        """How long measuring has taken, or takes up to now."""
        if self.started_s is None:
            return 0.0
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.started_s

    @property
    def cpu_s(self) -> float:
        """CPU time that this process spent while measuring; known once stopped."""
        return max(0.0, self._cpu_ended_s - self._cpu_started_s)

    def begin(self, request: LoadRequest, due_s: float | None = None) -> RequestResult:
        """A request will be sent as soon as its task runs, which sets ``sent_s`` anew."""
        result = RequestResult(
            number=request.number,
            output_len=request.output_len,
            tenant=request.tenant,
            due_s=due_s,
            sent_s=time.monotonic(),
        )
        self.results.append(result)
        self.num_in_flight += 1
        return result

    def end(self, result: RequestResult) -> None:
        """A request ended, or was given up while it ran."""
        self.num_in_flight -= 1
        self.num_ended += 1
        self.num_failed += result.state == "failed"
        self.num_output_tokens += result.num_tokens
