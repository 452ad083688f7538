"""Section ``overload`` of ``mesh bench route``: twice what the fleet can do, for a while.

    predicted   refused by the load predicted for when the prompt will have been computed
    now         refused by the load as it is
    off         nothing is refused: what is not served in time was computed for nothing

What is full is in turn the steps of the decode workers, their memory, and the way into it.

A pool that swings is full at one time and idle at another; how much it does is told as the
deviation of its load by its mean, while the burst lasts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan, RouteSection
from loadgen.bench.route_runs import (
    SIMULATED_NOTE,
    SLO_NOTE,
    Case,
    figure,
    goodput_per_s,
    ratios,
    run_seeds,
)
from loadgen.simulate.fleet_plan import EarlyRejection
from loadgen.simulate.result import SimulationResult

FLEET, TRACE = "h100x4-70b-8p8d", "burst"
MODES: tuple[EarlyRejection, ...] = ("predicted", "now", "off")
LONG = "long-prompts"
LONG_TTFT_MS, LONG_TBT_MS = 4_000.0, 50.0  # of its SLO
MEMORY_FLEET, WAY_FLEET = "h100x4-70b-8p1d", "h100x4-70b-24p4d"
WAY_RATE = 3.0  # times the trace's
_BURST_S = (50.0, 150.0)  # of the trace, after its first effects


def measure(plan: RoutePlan) -> RouteSection:
    """``early_rejection_gain``: goodput with predicted rejection ÷ without any, and ÷ by the load
    as it is; the latter also of long prompts, ``early_rejection_memory_gain`` where the decode
    worker's memory is full, ``early_rejection_way_gain`` where the way into it is."""
    runs = {
        mode: run_seeds(Case(fleet=FLEET, trace=TRACE, early_rejection=mode), plan)
        for mode in MODES
    }
    gain = ratios(runs["predicted"], runs["off"], goodput_per_s)
    over_now = ratios(runs["predicted"], runs["now"], goodput_per_s)
    figures: dict[str, Figure] = {
        **figure("early_rejection_gain", gain),
        **figure("early_rejection_predicted_vs_now", over_now),
        **_long_prompts("memory", MEMORY_FLEET, 1.0, plan),
        **_long_prompts("way", WAY_FLEET, WAY_RATE, plan),
        "overload": {mode: _row(of_mode, plan.length) for mode, of_mode in runs.items()},
    }
    return RouteSection(
        figures=figures,
        notes=(
            SIMULATED_NOTE,
            SLO_NOTE,
            f"overload: {FLEET}, trace {TRACE}, all policies place by score; refused requests are "
            "in no goodput; swing: deviation of a pool's load ÷ its mean during the burst",
            f"memory, way: {MEMORY_FLEET}, {WAY_FLEET}, trace {LONG}, predicted ÷ now; SLO: TTFT "
            f"{LONG_TTFT_MS:g} ms, time per token {LONG_TBT_MS:g} ms",
        ),
        plots=tuple(_plot(mode, runs[mode][0]) for mode in MODES) if plan.wants_plots else (),
    )


def _long_prompts(name: str, fleet: str, rate: float, plan: RoutePlan) -> dict[str, Figure]:
    """Predicted ÷ now, and what each comes to."""
    runs = {
        mode: run_seeds(
            Case(
                fleet=fleet,
                trace=LONG,
                early_rejection=mode,
                slo_ttft_ms=LONG_TTFT_MS,
                slo_tbt_ms=LONG_TBT_MS,
                rate=rate,
            ),
            plan,
        )
        for mode in MODES
    }
    per_s: dict[str, Figure] = {
        mode: round(statistics.fmean(map(goodput_per_s, some)), 2) for mode, some in runs.items()
    }
    gain = ratios(runs["predicted"], runs["now"], goodput_per_s)
    return {**figure(f"early_rejection_{name}_gain", gain), f"overload_{name}_per_s": per_s}


def _row(runs: Sequence[SimulationResult], length: float) -> Figure:
    first = runs[0]
    refused = sum(one.state == "failed" for one in first.recorder.results)
    return {
        "goodput_per_s": round(statistics.fmean(map(goodput_per_s, runs)), 2),
        "refused_share": round(refused / len(first.recorder.results), 3),
        "prefill_swing": round(_swing(first, "prefill_waiting", length), 3),
        "decode_swing": round(_swing(first, "decode_running", length), 3),
    }


def _swing(result: SimulationResult, pool: str, length: float) -> float:
    samples = result.samples
    values = [
        value
        for time_s, value in zip(samples.time_s, getattr(samples, pool), strict=True)
        if _BURST_S[0] * length <= time_s <= _BURST_S[1] * length
    ]
    mean = statistics.fmean(values) if values else 0.0
    return statistics.pstdev(values) / mean if mean > 0 else 0.0


def _plot(mode: str, result: SimulationResult) -> str:
    from loadgen.bench.route_page import loads_plot

    samples = result.samples
    return loads_plot(
        f"Pools in the burst, early rejection {mode}, first seed, simulated",
        samples.time_s,
        {"prefill: prompts waiting": samples.prefill_waiting,
         "decode: sequences running": samples.decode_running},
        "per worker",
    )  # fmt: skip
