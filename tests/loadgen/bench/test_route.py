"""``mesh bench route``: its sections, its page, and what is made of the real engine's runs."""

from __future__ import annotations

import importlib
import types
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from typer.testing import CliRunner

from infra.failure import EXIT_USAGE
from loadgen.bench import route
from loadgen.bench.route import RoutePlan, RouteSection, make_result, run_sections, section_names
from loadgen.bench.route_page import cdfs_plot, loads_plot, write_page
from loadgen.bench.route_real import real_figures
from loadgen.cli import bench_app
from loadgen.machine import MachineNote
from loadgen.measure import Summary, summarize
from schemas.errors import ConfigError


def test_all_simulated_sections_run_when_none_is_named() -> None:
    """What takes minutes of a real engine runs only when it is asked for."""
    assert {"reuse", "overload", "tenants", "headline", "decision"} == set(section_names(""))
    assert section_names("real ,reuse") == ("reuse", "real")


def test_an_unknown_section_is_named_with_those_there_are() -> None:
    """A typing error costs nobody a measurement."""
    with pytest.raises(ConfigError, match=r"no section reusse; there are reuse"):
        section_names("reusse")


@pytest.mark.parametrize("name", route.SECTIONS)
def test_every_section_can_be_measured(name: str) -> None:
    """Its module is there and has the function."""
    assert callable(importlib.import_module(route.SECTIONS[name]).measure)


@pytest.mark.parametrize("field", ["seeds", "length", "turns"])
def test_numbers_of_a_plan_are_checked(field: str) -> None:
    """The flag is named."""
    with pytest.raises(ConfigError) as refused:
        RoutePlan(**cast(Any, {field: 0}))
    assert refused.value.param == field


def test_what_sections_find_stands_in_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they ran, a note that several have once."""

    def measures(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            measure=lambda plan: RouteSection(figures={name: plan.seeds}, notes=("simulated",))
        )

    modules = {name: measures(name) for name in ("one", "two")}
    monkeypatch.setattr(route, "SECTIONS", {name: name for name in modules})
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    told: list[str] = []
    plan = RoutePlan(seeds=4)
    sections = run_sections(["two", "one"], plan, told.append)
    assert told == ["two", "one"]
    result = make_result(told, plan, sections, MachineNote.now())
    assert list(result.figures.items()) == [("two", 4), ("one", 4)]
    assert result.notes == ("simulated",)


@pytest.mark.parametrize("flags", [("--only", "nothing"), ("--seeds", "0"), ("--html", "/no/x")])
def test_a_wrong_flag_ends_the_command_before_anything_is_measured(flags: tuple[str, str]) -> None:
    """With the exit code of a wrong setting."""
    assert CliRunner().invoke(bench_app, ["route", *flags]).exit_code == EXIT_USAGE


def test_a_page_has_plots_notes_and_figures(tmp_path: Path) -> None:
    """Nothing is loaded from elsewhere; a request that never came leaves its curve short."""
    plots = [
        cdfs_plot("TTFT", {"score": [1.0, 2.0], "random": [3.0, float("inf")], "none": []}, 500),
        loads_plot("load", [0.0, 1.0], {"prefill": [0.5, 1.0], "decode": [1.0, 0.2]}, "load"),
    ]
    section = RouteSection(figures={"ttft_vs_random": 0.2}, notes=("simulated <b>",))
    result = make_result(["reuse"], RoutePlan(), [section], MachineNote.now())
    write_page(result, plots, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 2
    assert "simulated &lt;b&gt;" in page
    assert "ttft_vs_random" in page
    assert not any(tag in page for tag in ("<script", "<link", "src="))
    with pytest.raises(ConfigError, match="can't be written"):
        write_page(result, plots, tmp_path)


def summary(ttft_ms: float, tokens_s: float) -> Summary:
    made = summarize([], wall_s=1.0)
    return msgspec.structs.replace(
        made,
        ttft_ms=msgspec.structs.replace(made.ttft_ms, num=1, p50=ttft_ms),
        output_tokens_per_s=tokens_s,
        num_prompt_tokens=100,
        num_cached_tokens=50,
    )


def test_ratios_of_the_real_engine_are_of_pairs() -> None:
    """A run is held against the other mesh's run of the same prompts, whose machine was as busy."""
    runs = {
        "score": [summary(100, 50), summary(300, 20), summary(200, 30)],
        "random": [summary(200, 40), summary(600, 10), summary(100, 60)],
    }
    figures = real_figures(runs)
    assert figures["ttft_ratio"] == {"median": 0.5, "least": 0.5, "greatest": 2.0}
    assert figures["output_ratio"] == {"median": 1.25, "least": 0.5, "greatest": 2.0}
    assert figures["score"] == {"ttft_p50_ms": 200, "output_tok_s": 30, "cached_share": 0.5}
