"""Sections of ``mesh bench route`` on short traces: which keys they give, and what these mean."""

from __future__ import annotations

import random

import pytest

from loadgen import scenarios
from loadgen.bench import route_overload, route_reuse, route_tenants
from loadgen.bench.route import RoutePlan
from loadgen.bench.route_decision import Rig
from loadgen.bench.route_headline import LIMIT_MS, Found, bisect, warm_ttfts_ms
from loadgen.bench.route_overload import (
    LONG,
    LONG_TBT_MS,
    LONG_TTFT_MS,
    MEMORY_FLEET,
    WAY_FLEET,
    WAY_RATE,
)
from loadgen.bench.route_runs import Case, entries, figure, goodput_per_s, run, ttfts_ms
from loadgen.bench.stream import LoadFailed
from loadgen.simulate.fleet_plan import EarlyRejection, read_fleet
from schemas.errors import ConfigError

SHORT = RoutePlan(seeds=1, length=0.02, wants_plots=True)


@pytest.mark.parametrize("name", scenarios.names("fleets"))
def test_every_fleet_of_a_scenario_can_be_run(name: str) -> None:
    """They parse, name profiles that there are, and say what they stand for."""
    path = scenarios.fleet_file(name)
    assert path.read_text().startswith("# ")
    assert 8 <= len(read_fleet(path).specs()) <= 32


def test_reuse_gives_its_figures_and_their_ranges() -> None:
    """All keys of the comparison with baselines, each with what lies between the seeds."""
    section = route_reuse.measure(SHORT)
    keys = {
        f"{prefix}{key}"
        for prefix in ("", "held_out_", "mixed_")
        for key in ("ttft_vs_random", "ttft_vs_least_loaded", "goodput_vs_random")
    } | {"no_reuse_vs_least_loaded", "hot_prefix_max_over_mean"}
    assert keys <= section.figures.keys()
    assert {f"{key}_range" for key in keys} <= section.figures.keys()
    assert all(isinstance(section.figures[key], float) for key in keys)
    assert len(section.plots) == 2
    assert any("simulated" in note and "temperature" in note for note in section.notes)


def test_overload_and_tenants_give_their_figures() -> None:
    """One ratio each, and what it is made of."""
    overload = route_overload.measure(SHORT)
    gains = {f"early_rejection{kind}_gain" for kind in ("", "_memory", "_way")}
    assert {*gains, *(f"{gain}_range" for gain in gains), "overload"} <= set(overload.figures)
    assert len(overload.plots) == 3
    tenants = route_tenants.measure(SHORT)
    assert {"small_tenant_ttft_ratio", "tenants"} <= tenants.figures.keys()


@pytest.mark.parametrize(("fleet", "rate"), [(MEMORY_FLEET, 1.0), (WAY_FLEET, WAY_RATE)])
def test_decode_that_is_full_by_memory_or_the_way_to_it_is_foreseen(
    fleet: str, rate: float
) -> None:
    """Who is admitted by the load that is predicted is served in time, nearly all: what was
    handed over and waits for room, or for the way in, is not forgotten. It is no less than by the
    load as it is."""

    def goodput(mode: EarlyRejection) -> tuple[float, float]:
        case = Case(
            fleet=fleet, trace=LONG, early_rejection=mode, rate=rate,
            slo_ttft_ms=LONG_TTFT_MS, slo_tbt_ms=LONG_TBT_MS,
        )  # fmt: skip
        result = run(case, RoutePlan(seeds=1, length=0.4), 0)
        per_s = goodput_per_s(result)
        served = sum(one.state == "completed" for one in result.recorder.results)
        return per_s, per_s * result.offered_s / served

    predicted, share = goodput("predicted")
    assert share >= 0.9
    assert predicted >= 0.95 * goodput("now")[0]


def test_a_case_is_the_same_requests_for_every_policy() -> None:
    """A tenant's requests alone are those that it sends beside the others."""
    both = entries(Case(fleet="h100-8p8d", trace="tenants"), SHORT, 0)
    alone = entries(Case(fleet="h100-8p8d", trace="tenants", tenant="small"), SHORT, 0)
    assert alone == tuple(one for one in both if one.tenant == "small")
    assert 0 < len(alone) < len(both) / 4
    with pytest.raises(ConfigError):
        entries(Case(fleet="h100-8p8d", trace="nothing"), SHORT, 0)


def test_refused_requests_are_in_no_goodput() -> None:
    """They are infinitely late, and the time in which they came counts."""
    case = Case(fleet="h100-8p8d", trace="no-reuse")
    result = run(case, SHORT, 0)
    before = goodput_per_s(result)
    first, *_ = [one for one in result.recorder.results if one.state == "completed"]
    first.fail("over_budget", "refused")
    assert goodput_per_s(result) < before
    assert float("inf") in ttfts_ms(result)
    assert 0 < len(warm_ttfts_ms(result)) < len(result.recorder.results)


def test_the_greatest_good_rate_is_found() -> None:
    """To within a twentieth; with none that is good enough there is no figure."""

    def at(factor: float) -> Found:
        return Found(factor=factor, rps=10 * factor, p99_ms=LIMIT_MS * factor / 1.7)

    found = bisect(at)
    assert 1.6 < found.factor <= 1.7
    with pytest.raises(LoadFailed, match="already at"):
        bisect(lambda factor: Found(factor=factor, rps=1.0, p99_ms=LIMIT_MS + 1))


def test_a_figure_is_a_mean_with_its_extremes() -> None:
    """Of one value per seed."""
    assert figure("x", [1.0, 2.0, 6.0]) == {"x": 3.0, "x_range": {"least": 1.0, "greatest": 6.0}}


def test_decisions_are_made_by_a_router_that_knows_what_workers_hold() -> None:
    """Prompts go to workers by name, and hashes of known ones are remembered."""
    rig = Rig.make(random.Random(1), num_holders=4, fill_blocks=1_000)
    assert rig.index.num_blocks > 1_000
    assert len(rig.place_all_us(rig.held[:3])) == 3
    places = [rig.placement.place_prefill(record) for record in rig.held]
    assert all(place.worker.startswith("worker-") for place in places)
    assert any(place.num_cached > 0 for place in places)
