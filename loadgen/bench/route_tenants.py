"""Section ``tenants`` of ``mesh bench route``: a small tenant beside one that sends ten times as
much, more than the fleet can do; and the same requests of the small one alone."""

from __future__ import annotations

import numpy as np

from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan, RouteSection
from loadgen.bench.route_runs import SIMULATED_NOTE, Case, figure, run_seeds, ttfts_ms

FLEET, TRACE = "h100-8p8d", "tenants"
SMALL, LARGE = "small", "large"


def measure(plan: RoutePlan) -> RouteSection:
    """``small_tenant_ttft_ratio``: its TTFT p99 beside the large one ÷ alone."""
    both = run_seeds(_case(""), plan)
    alone = run_seeds(_case(SMALL), plan)
    ratios = [
        p99_ms(ttfts_ms(a, SMALL)) / p99_ms(ttfts_ms(b, SMALL))
        for a, b in zip(both, alone, strict=True)
    ]
    figures: dict[str, Figure] = {
        **figure("small_tenant_ttft_ratio", ratios),
        "tenants": {
            "small_alone_p99_ms": round(p99_ms(ttfts_ms(alone[0], SMALL)), 1),
            "small_beside_p99_ms": round(p99_ms(ttfts_ms(both[0], SMALL)), 1),
            "large_p99_ms": round(p99_ms(ttfts_ms(both[0], LARGE)), 1),
        },
    }
    note = f"tenants: {FLEET}, trace {TRACE}; a refused request counts as infinite"
    return RouteSection(figures=figures, notes=(SIMULATED_NOTE, note))


def p99_ms(values_ms: list[float]) -> float:
    """The 99th percentile, the next greater value where it lies between two."""
    return float(np.percentile(values_ms, 99, method="higher"))


def _case(tenant: str) -> Case:
    """Nothing is refused: who is over its share waits."""
    return Case(fleet=FLEET, trace=TRACE, tenant=tenant, slo_ttft_ms=0.0, slo_tbt_ms=0.0)
