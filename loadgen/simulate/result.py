"""What a simulation has brought: each request's times, and what workers and routers did."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from loadgen.recorder import Recorder
from loadgen.simulate.decode_batch import StepLog
from loadgen.simulate.fleet_plan import FleetPlan
from loadgen.simulate.options import SimulationOptions
from loadgen.simulate.pool_samples import PoolSamples
from loadgen.simulate.request import Request

Times = np.ndarray[tuple[int], np.dtype[np.float64]]


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did; times are virtual."""

    name: str
    role: str
    profile: str
    present_s: float
    busy_share: float  # of the time that it was there
    prefill_share: float  # of that time, in steps that compute prompts
    num_taken: int  # tasks
    num_computed_tokens: int  # of prompts
    num_fetches: int
    num_preemptions: int


@dataclass(slots=True, kw_only=True)
class SimulationResult:
    """A run.

    Attributes:
        recorder: the requests' results, its clock being virtual.
        decisions_s: CPU time of this machine for each placement of a prompt.
        cpu_s: of this machine, for the whole run.
        virtual_s: from the first request to the last token.
        offered_s: from the first request to the last.
    """

    plan: FleetPlan
    options: SimulationOptions
    slo_ms: dict[str, float]
    recorder: Recorder
    workers: tuple[WorkerFigures, ...]
    samples: PoolSamples
    decisions_s: array[float]
    cpu_s: float
    virtual_s: float
    offered_s: float
    num_events: int
    num_prompt_tokens: int
    num_cached_tokens: int
    kv_bytes_moved: int

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that was found in a cache."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def busy_max_over_mean(self, role: str) -> float:
        """The busiest worker of a role by the mean of all; 0 without any."""
        shares = [one.busy_share for one in self.workers if one.role == role]
        return max(shares) / (sum(shares) / len(shares)) if sum(shares) else 0.0

    def goodput_share(self) -> float:
        """Of all requests of the trace, those that were answered within the SLO."""
        results = self.recorder.results
        return sum(one.meets(self.slo_ms) for one in results) / max(1, len(results))


def token_times(requests: Sequence[Request], hop_s: float) -> None:
    """Fill in when the client read each token: at the end of its step, and a hop later."""
    ends: defaultdict[StepLog, Times | None] = defaultdict(lambda: None)
    for request in requests:
        parts: list[Times] = []
        for segment in request.segments:
            if isinstance(segment, float):
                parts.append(np.array([segment]))
                continue
            log, first, end = segment
            steps = ends[log]
            if steps is None:
                steps = ends[log] = log.ends_s()
            parts.append(steps[first:end])
        if parts:
            request.result.event_s = array("d", (np.concatenate(parts) + hop_s).tobytes())
            request.result.num_counted_tokens = len(request.result.event_s)
