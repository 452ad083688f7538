"""Simulated runs of ``mesh bench route``, and figures over several seeds of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from loadgen import scenarios
from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan
from loadgen.recipes import make_trace, read_recipe
from loadgen.simulate.fleet_plan import EarlyRejection, PlacementPolicy, read_fleet
from loadgen.simulate.options import SimulationOptions
from loadgen.simulate.result import SimulationResult
from loadgen.simulate.run import simulate
from loadgen.traces import TraceEntry
from pipeline.scoring import Weights

SLO_TTFT_MS = 2_000.0
SLO_TBT_MS = 80.0
SLO_NOTE = f"SLO: TTFT {SLO_TTFT_MS:g} ms, time per token {SLO_TBT_MS:g} ms"
SIMULATED_NOTE = (
    "simulated: worker profiles of published figures, the mesh's own placement, index, outlook and "
    f"admission, on virtual time; softmax temperature {Weights().temperature:g}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fleet, a trace, and how it is decided. ``rate`` multiplies the trace's; ``tenant``: only
    its requests are sent."""

    fleet: str
    trace: str
    placement: PlacementPolicy = "score"
    early_rejection: EarlyRejection = "off"
    slo_ttft_ms: float = SLO_TTFT_MS
    slo_tbt_ms: float = SLO_TBT_MS
    rate: float = 1.0
    tenant: str = ""


def run(case: Case, plan: RoutePlan, repeat: int) -> SimulationResult:
    """Simulate one; ``repeat`` is the seed of trace and chance.

    Raises:
        ConfigError: there is no such fleet or trace.
    """
    options = SimulationOptions(
        placement=case.placement,
        early_rejection=case.early_rejection,
        slo_ttft_ms=case.slo_ttft_ms,
        slo_tbt_ms=case.slo_tbt_ms,
        seed=repeat,
    )
    return simulate(
        read_fleet(scenarios.fleet_file(case.fleet)), entries(case, plan, repeat), options
    )


def entries(case: Case, plan: RoutePlan, repeat: int) -> tuple[TraceEntry, ...]:
    """The requests of a case."""
    recipe = read_recipe(scenarios.trace_file(case.trace)).at_rate(case.rate)
    recipe = msgspec.structs.replace(recipe, duration_s=recipe.duration_s * plan.length)
    made = make_trace(recipe, repeat)
    return tuple(one for one in made if case.tenant in ("", one.tenant))


def run_seeds(case: Case, plan: RoutePlan) -> list[SimulationResult]:
    """One run for each seed."""
    return [run(case, plan, repeat) for repeat in range(plan.seeds)]


def mean_ttft_ms(result: SimulationResult) -> float:
    """Of the requests that were answered."""
    return statistics.fmean(
        one.ttft_s * 1e3 for one in result.recorder.results if one.state == "completed"
    )


def ttfts_ms(result: SimulationResult, tenant: str = "") -> list[float]:
    """Of all requests, refused ones infinite; of one tenant where it is named."""
    return [
        one.ttft_s * 1e3 if one.state == "completed" else float("inf")
        for one in result.recorder.results
        if tenant in ("", one.tenant)
    ]


def goodput_per_s(result: SimulationResult) -> float:
    """Requests within the SLO, that of the case if it has one, by the time in which all came:
    refused ones count as failed, and nobody gains by being slow."""
    policy = result.plan.policy
    slo_ms = {
        "ttft": policy.slo_ttft_ms or SLO_TTFT_MS,
        "tpot": policy.slo_tbt_ms or SLO_TBT_MS,
    }
    met = sum(one.meets(slo_ms) for one in result.recorder.results)
    return met / result.offered_s


def ratios(
    ours: Sequence[SimulationResult],
    others: Sequence[SimulationResult],
    measure: Callable[[SimulationResult], float],
) -> list[float]:
    """Ours by the others', of runs of the same seed."""
    return [measure(a) / max(measure(b), 1e-9) for a, b in zip(ours, others, strict=True)]


def figure(name: str, values: Sequence[float]) -> dict[str, Figure]:
    """The mean of one value per seed under ``name``, and between what they lie."""
    return {
        name: round(statistics.fmean(values), 4),
        f"{name}_range": {"least": round(min(values), 4), "greatest": round(max(values), 4)},
    }
