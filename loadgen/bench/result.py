"""What every bench prints: its figures, what they were measured with, and on what machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.machine import MachineNote

Figure = float | int | str | Mapping[str, "Figure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """The outcome of one bench. ``figures`` are top-level keys of the JSON, under these names."""

    bench: str
    figures: dict[str, Figure]
    settings: dict[str, object]
    machine: MachineNote
    notes: tuple[str, ...] = field(default=())  # such as "simulated engine"

    def to_json(self) -> str:
        """One indented JSON object: the figures, and beside them how they came about."""
        content = {
            **self.figures,
            "bench": self.bench,
            "settings": self.settings,
            "noise": msgspec.to_builtins(self.machine),
            "notes": list(self.notes),
        }
        return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()

    def show(self, *, as_json: bool, console: Console | None = None) -> None:
        """Print JSON and nothing else, or a table with the notes below it."""
        console = console or Console()
        if as_json:
            console.out(self.to_json(), highlight=False)
            return
        table = Table(title=f"mesh bench {self.bench}", title_justify="left")
        table.add_column("figure")
        table.add_column("", justify="right")
        for name, value in self.figures.items():
            table.add_row(name, _text(value))
        console.print(table)
        for note in (*self.notes, self.machine.text):
            console.print(Text(note, "dim"))


def _text(value: Figure) -> str:
    if isinstance(value, Mapping):
        return "   ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)
