"""Section ``reuse`` of ``mesh bench route``: where prompts begin alike, and where they do not.

shared-prefix   our score, at random, least loaded: TTFT and goodput
held-out        the same on a trace that nothing was tuned on
mixed           the shared-prefix trace on workers of unequal speed
no-reuse        what looking for prefixes costs where there are none
hot-prefix      whether all that begin alike go to one worker
"""

from __future__ import annotations

from loadgen.bench.result import Figure
from loadgen.bench.route import RoutePlan, RouteSection
from loadgen.bench.route_runs import (
    SIMULATED_NOTE,
    SLO_NOTE,
    SLO_TTFT_MS,
    Case,
    figure,
    goodput_per_s,
    mean_ttft_ms,
    ratios,
    run_seeds,
    ttfts_ms,
)
from loadgen.simulate.fleet_plan import PlacementPolicy
from loadgen.simulate.result import SimulationResult

FLEET = "h100-8p8d"
MIXED_FLEET = "mixed-8p8d"
BASELINES: tuple[PlacementPolicy, ...] = ("random", "least-loaded")

Runs = dict[PlacementPolicy, list[SimulationResult]]


def measure(plan: RoutePlan) -> RouteSection:
    """``ttft_vs_random``, ``ttft_vs_least_loaded``, ``goodput_vs_random`` and the same of the
    held-out trace and the mixed fleet; ``no_reuse_vs_least_loaded``;
    ``hot_prefix_max_over_mean``."""
    shared = _policies(plan, FLEET, "shared-prefix")
    held_out = _policies(plan, FLEET, "held-out")
    mixed = _policies(plan, MIXED_FLEET, "shared-prefix")
    new = _policies(plan, FLEET, "no-reuse", ("least-loaded",))
    hot = run_seeds(Case(fleet=FLEET, trace="hot-prefix"), plan)
    figures: dict[str, Figure] = {
        **_against(shared, ""),
        **_against(held_out, "held_out_"),
        **_against(mixed, "mixed_"),
        **figure("no_reuse_vs_least_loaded", ratios(*_pair(new, "least-loaded"), goodput_per_s)),
        **figure(
            "no_reuse_ttft_vs_least_loaded", ratios(*_pair(new, "least-loaded"), mean_ttft_ms)
        ),
        **figure("hot_prefix_max_over_mean", [one.busy_max_over_mean("prefill") for one in hot]),
        "shared_prefix": _table(shared),
        "held_out": _table(held_out),
        "mixed": _table(mixed),
    }
    return RouteSection(
        figures=figures,
        notes=(
            SIMULATED_NOTE,
            SLO_NOTE,
            f"reuse: {FLEET}; mean TTFT of what was answered, ours ÷ theirs; nothing is refused",
        ),
        plots=tuple(_plots(shared, held_out)) if plan.wants_plots else (),
    )


def _policies(
    plan: RoutePlan,
    fleet: str,
    trace: str,
    baselines: tuple[PlacementPolicy, ...] = BASELINES,
) -> Runs:
    return {
        policy: run_seeds(Case(fleet=fleet, trace=trace, placement=policy), plan)
        for policy in ("score", *baselines)
    }


def _pair(
    runs: Runs, baseline: PlacementPolicy
) -> tuple[list[SimulationResult], list[SimulationResult]]:
    return runs["score"], runs[baseline]


def _against(runs: Runs, prefix: str) -> dict[str, Figure]:
    random, least = _pair(runs, "random"), _pair(runs, "least-loaded")
    return {
        **figure(f"{prefix}ttft_vs_random", ratios(*random, mean_ttft_ms)),
        **figure(f"{prefix}ttft_vs_least_loaded", ratios(*least, mean_ttft_ms)),
        **figure(f"{prefix}goodput_vs_random", ratios(*random, goodput_per_s)),
    }


def _table(runs: Runs) -> Figure:
    """What the ratios are made of, of the first seed."""
    return {
        policy: {
            "mean_ttft_ms": round(mean_ttft_ms(of_policy[0]), 1),
            "goodput_per_s": round(goodput_per_s(of_policy[0]), 2),
            "offered_per_s": round(len(of_policy[0].recorder.results) / of_policy[0].offered_s, 2),
            "hit_rate": round(of_policy[0].hit_rate, 3),
        }
        for policy, of_policy in runs.items()
    }


def _plots(shared: Runs, held_out: Runs) -> list[str]:
    from loadgen.bench.route_page import cdfs_plot

    return [
        cdfs_plot(
            f"TTFT, trace {name}, first seed, simulated",
            {policy: ttfts_ms(of_policy[0]) for policy, of_policy in runs.items()},
            SLO_TTFT_MS,
        )
        for name, runs in (("shared-prefix", shared), ("held-out", held_out))
    ]
