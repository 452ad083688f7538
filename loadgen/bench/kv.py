"""``mesh bench kv``: what the KV plane costs, and what it saves.

Its figures come in sections, each a module with a function ``measure``, imported when it runs::

    def measure(plan: KvPlan) -> KvSection: ...

A section starts what it measures itself and leaves nothing behind; one runs after the other, so
that none disturbs another. Figures of all sections are top-level keys of one JSON object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from loadgen.bench.result import BenchResult, Figure
from loadgen.bench.sections import chosen, measured, tell_begun
from loadgen.machine import MachineNote, OthersMeter
from schemas.errors import ConfigError, MeshError

SECTIONS: dict[str, str] = {
    "disk": "loadgen.bench.kv_disk",
    "eviction": "loadgen.bench.kv_eviction",
    "index": "loadgen.bench.kv_index",
    "links": "loadgen.bench.kv_links",
    "prefix": "loadgen.bench.kv_prefix",
    "remote": "loadgen.bench.kv_remote",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """What all sections are told.

    ``model`` is a built-in name, a folder or a .gguf file; ``turns`` is how often each thing is
    measured, medians count.
    """

    model: str
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSection:
    """What one section found; ``notes`` say how to read it."""

    figures: Mapping[str, Figure]
    notes: tuple[str, ...] = ()


def command(
    only: Annotated[
        str, typer.Option(help="sections to run, with commas; all: " + ", ".join(SECTIONS))
    ] = "",
    model: Annotated[
        str, typer.Option(help="built-in name, folder or .gguf file")
    ] = "smollm2-135m",
    turns: Annotated[int, typer.Option(help="how often each is measured; medians count")] = 9,
    json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Measure how KV moves between workers, tiers and turns of a conversation."""
    machine = MachineNote.now()
    try:
        names = section_names(only)
        if not 1 <= turns <= 1000:
            raise ConfigError("turns is not within 1 and 1000", param="turns")
        meter = OthersMeter()
        sections = run_sections(names, KvPlan(model=model, turns=turns), tell_begun)
        machine = machine.meanwhile(meter.cores())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh bench kv", ours)) from error
    BenchResult(
        bench="kv",
        figures={name: value for section in sections for name, value in section.figures.items()},
        settings={"sections": list(names), "model": model, "turns": turns},
        machine=machine,
        notes=tuple(note for section in sections for note in section.notes),
    ).show(as_json=json)


def section_names(only: str) -> tuple[str, ...]:
    """The sections that ``only`` names with commas between them, in their usual order; all when
    it is empty.

    Raises:
        ConfigError: there is no such section.
    """
    return chosen(only, SECTIONS)


def run_sections(
    names: Sequence[str], plan: KvPlan, tell: Callable[[str], None]
) -> tuple[KvSection, ...]:
    """One after the other; ``tell`` hears which one begins.

    Raises:
        MeshError: a section could not be measured.
    """
    return measured(names, SECTIONS, plan, tell)
