"""``mesh bench route``: what placing, admitting and sharing out requests brings.

Its figures come in sections, each a module with a function ``measure``, imported when it runs::

    def measure(plan: RoutePlan) -> RouteSection: ...

All but ``decision``, ``real`` and ``suffix`` are simulated: the fleets and traces of
``loadgen/scenarios``, the mesh's own decisions, on virtual time. Such a figure is the mean over
traces of several seeds, and ``<figure>_range`` holds the least and the greatest of them; it does
not depend on this machine.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.result import BenchResult, Figure
from loadgen.bench.sections import chosen, measured, tell_begun
from loadgen.machine import MachineNote, OthersMeter
from schemas.errors import ConfigError, MeshError

SECTIONS: dict[str, str] = {
    "reuse": "loadgen.bench.route_reuse",
    "overload": "loadgen.bench.route_overload",
    "tenants": "loadgen.bench.route_tenants",
    "headline": "loadgen.bench.route_headline",
    "decision": "loadgen.bench.route_decision",
    "real": "loadgen.bench.route_real",
    "suffix": "loadgen.bench.route_suffix",
}
ONLY_WHEN_ASKED = frozenset({"real", "suffix"})  # they run a real model, for minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """What all sections are told.

    ``seeds`` is how many traces of a kind are tried, ``length`` the share of a trace's time that
    is run, ``turns`` how often a thing is measured that is no simulation. ``wants_plots``: a page
    will be written.
    """

    seeds: int = 3
    length: float = 1.0
    turns: int = 5
    model: str = "smollm2-135m"
    wants_plots: bool = False

    def __post_init__(self) -> None:
        for name, most in (("seeds", 100), ("length", 10), ("turns", 1000)):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} is not above 0 and at most {most}", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSection:
    """What one section found; ``notes`` say how to read it, ``plots`` are SVG."""

    figures: Mapping[str, Figure]
    notes: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()


def command(
    only: Annotated[
        str,
        typer.Option(
            help=f"sections to run, with commas: {', '.join(SECTIONS)}; "
            f"all but {', '.join(ONLY_WHEN_ASKED)} when not given"
        ),
    ] = "",
    seeds: Annotated[int, typer.Option(help="traces of a kind, each with another seed")] = 3,
    length: Annotated[float, typer.Option(help="share of a trace's time that is run")] = 1.0,
    turns: Annotated[int, typer.Option(help="not simulated: how often each is measured")] = 5,
    model: Annotated[
        str, typer.Option(help="real, suffix: built-in name, folder or .gguf file")
    ] = "smollm2-135m",
    html: Annotated[Path | None, typer.Option(help="write a page with plots there")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Try routing, early rejection and fairness on simulated fleets."""
    machine = MachineNote.now()
    try:
        names = section_names(only)
        plan = RoutePlan(
            seeds=seeds, length=length, turns=turns, model=model, wants_plots=html is not None
        )
        check_page(html)
        meter = OthersMeter()
        sections = run_sections(names, plan, tell_begun)
        machine = machine.meanwhile(meter.cores())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench route", ours)) from error
    result = make_result(names, plan, sections, machine)
    if html is not None:
        from loadgen.bench.route_page import write_page

        write_page(result, [plot for section in sections for plot in section.plots], html)
    result.show(as_json=json)


def make_result(
    names: Sequence[str], plan: RoutePlan, sections: Sequence[RouteSection], machine: MachineNote
) -> BenchResult:
    """Figures and notes of all sections."""
    settings: dict[str, object] = {
        "sections": list(names),
        "seeds": plan.seeds,
        "length": plan.length,
        "turns": plan.turns,
        "model": plan.model,
    }
    return BenchResult(
        bench="route",
        figures={name: value for section in sections for name, value in section.figures.items()},
        settings=settings,
        machine=machine,
        notes=tuple(dict.fromkeys(note for section in sections for note in section.notes)),
    )


def section_names(only: str) -> tuple[str, ...]:
    """The sections that ``only`` names with commas between them, in their usual order; when it is
    empty, all that are not in ``ONLY_WHEN_ASKED``.

    Raises:
        ConfigError: there is no such section.
    """
    return chosen(only, SECTIONS, ONLY_WHEN_ASKED)


def run_sections(
    names: Sequence[str], plan: RoutePlan, tell: Callable[[str], None]
) -> tuple[RouteSection, ...]:
    """One after the other; ``tell`` hears which one begins.

    Raises:
        MeshError: a section could not be measured.
    """
    return measured(names, SECTIONS, plan, tell)


def check_page(html: Path | None) -> None:
    """Whether a page can be written there.

    Raises:
        ConfigError: there is no such folder, or plots can't be drawn here.
    """
    if html is None:
        return
    if not html.absolute().parent.is_dir():
        raise ConfigError(f"no folder for {html}", param="html")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: install the extra [report]", param="html")
