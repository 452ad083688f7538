"""``mesh bench kv``: sections are chosen by name and run in order."""

from __future__ import annotations

import importlib
import types

import pytest
from typer.testing import CliRunner

from infra.failure import EXIT_USAGE
from loadgen.bench import kv
from loadgen.bench.kv import KvPlan, KvSection, run_sections, section_names
from loadgen.cli import bench_app
from schemas.errors import ConfigError

PLAN = KvPlan(model="tiny", turns=1)


def test_sections_run_in_their_order_whatever_the_order_of_asking() -> None:
    """All of them when none is named."""
    names = tuple(kv.SECTIONS)
    assert section_names("") == names
    assert section_names(" ,".join(reversed(names))) == names
    assert section_names(f"{names[0]},") == names[:1]


def test_an_unknown_section_is_named_with_those_there_are() -> None:
    """A typing error costs nobody a measurement."""
    with pytest.raises(ConfigError, match=r"no section lniks; there are .*links"):
        section_names("links,lniks")


@pytest.mark.parametrize("name", kv.SECTIONS)
def test_every_section_can_be_measured(name: str) -> None:
    """Its module is there and has the function."""
    assert callable(importlib.import_module(kv.SECTIONS[name]).measure)


def test_figures_of_all_sections_are_top_level_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they ran, which is told."""

    def measures(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            measure=lambda plan: KvSection(figures={f"{name}_ms": plan.turns}, notes=(name,))
        )

    modules = {name: measures(name) for name in ("one", "two")}
    monkeypatch.setattr(kv, "SECTIONS", {name: name for name in modules})
    monkeypatch.setattr(importlib, "import_module", modules.__getitem__)
    told: list[str] = []
    sections = run_sections(["two", "one"], PLAN, told.append)
    assert told == ["two", "one"]
    assert [dict(section.figures) for section in sections] == [{"two_ms": 1}, {"one_ms": 1}]


def test_a_section_that_does_not_exist_ends_the_command() -> None:
    """With the exit code of a wrong setting, before anything is measured."""
    result = CliRunner().invoke(bench_app, ["kv", "--only", "nothing"])
    assert result.exit_code == EXIT_USAGE
    assert "there is no section nothing" in result.output


def test_a_wrong_number_of_turns_is_refused() -> None:
    """Named as it is typed."""
    result = CliRunner().invoke(bench_app, ["kv", "--turns", "0"])
    assert result.exit_code == EXIT_USAGE
    assert "turns" in result.output
