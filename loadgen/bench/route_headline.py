"""Section ``headline`` of ``mesh bench route``: how many requests per second eight machines serve,
as one mesh and as eight servers behind round robin.

Searched for is the greatest rate at which 99 of 100 first tokens come within 500 ms, by bisection.
What comes in the trace's first third fills the caches and is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress

from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan, RouteSection
from loadgen.bench.route_runs import SIMULATED_NOTE, Case, figure, run, ttfts_ms
from loadgen.bench.route_tenants import p99_ms
from loadgen.bench.stream import LoadFailed
from loadgen.simulate.result import SimulationResult

TRACE = "headline"
MESH, SEPARATE = "h100-70b-mesh", "h100-70b-separate"
LIMIT_MS = 500.0
_LOWEST, _HIGHEST = 1 / 2, 8.0  # of the trace's own rate
_WARM_SHARE = 1 / 3  # of the trace's time
_STEPS = 6  # halvings: to within 5 % of the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The greatest rate that was good enough: the factor of the trace's rate, requests per second
    that came, and their TTFT."""

    factor: float
    rps: float
    p99_ms: float


def measure(plan: RoutePlan) -> RouteSection:
    """``headline_rps_ratio``: requests per second, the mesh ÷ eight separate servers."""
    found = [(search(plan, MESH, seed), search(plan, SEPARATE, seed)) for seed in range(plan.seeds)]
    figures: dict[str, Figure] = {
        **figure("headline_rps_ratio", [mesh.rps / separate.rps for mesh, separate in found]),
        "headline": {
            "mesh_rps": round(found[0][0].rps, 2),
            "mesh_p99_ms": round(found[0][0].p99_ms, 1),
            "separate_rps": round(found[0][1].rps, 2),
            "separate_p99_ms": round(found[0][1].p99_ms, 1),
        },
    }
    note = (
        f"headline: requests/s at TTFT p99 <= {LIMIT_MS:g} ms, trace {TRACE}, fleets {MESH} and "
        f"{SEPARATE}, bisection in {_STEPS} steps"
    )
    return RouteSection(figures=figures, notes=(SIMULATED_NOTE, note))


def search(plan: RoutePlan, fleet: str, seed: int) -> Found:
    """The greatest rate of one fleet.

    Raises:
        LoadFailed: not even the least rate is good enough.
    """
    case = Case(fleet=fleet, trace=TRACE, slo_ttft_ms=0.0, slo_tbt_ms=0.0)

    def at(factor: float) -> Found:
        result = run(replace(case, rate=factor), plan, seed)
        rps = len(result.recorder.results) / result.offered_s
        return Found(factor=factor, rps=rps, p99_ms=p99_ms(warm_ttfts_ms(result)))

    return bisect(at)


def warm_ttfts_ms(result: SimulationResult) -> list[float]:
    """Of the requests that came after the caches were filled."""
    results = result.recorder.results
    first_s = results[0].sent_s
    is_warm = [one.sent_s - first_s >= _WARM_SHARE * result.offered_s for one in results]
    return list(compress(ttfts_ms(result), is_warm))


def bisect(at: Callable[[float], Found]) -> Found:
    """The greatest factor found whose p99 is within the limit, halving the ratio of the bounds
    with every step.

    Raises:
        LoadFailed: not even the least rate is good enough.
    """
    low, high = _LOWEST, _HIGHEST
    best = at(low)
    if best.p99_ms > LIMIT_MS:
        raise LoadFailed(f"TTFT p99 is {best.p99_ms:.0f} ms already at {best.rps:.2f} requests/s")
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        found = at(middle)
        if found.p99_ms <= LIMIT_MS:
            best, low = found, middle
        else:
            high = middle
    return best
