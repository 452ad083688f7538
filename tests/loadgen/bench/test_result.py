import io
import json

from rich.console import Console

from loadgen.bench.result import BenchResult
from loadgen.machine import MachineNote

RESULT = BenchResult(
    bench="hop",
    figures={"a_ms": {"p50": 1.25, "p99": 2.5}, "count": 7},
    settings={"model": "m"},
    machine=MachineNote(num_cores=2, load_1min=1.5, is_busy=True, system="s", python="3"),
    notes=("[simulated] engine",),
)


def show(*, as_json: bool) -> str:
    console = Console(file=io.StringIO(), width=40)
    RESULT.show(as_json=as_json, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_is_one_object_and_nothing_else() -> None:
    """A program reads stdout whole, however narrow the terminal is."""
    content = json.loads(show(as_json=True))
    assert content["a_ms"] == {"p50": 1.25, "p99": 2.5}
    assert content["count"] == 7
    assert content["noise"]["is_busy"] is True
    assert content["notes"] == ["[simulated] engine"]


def test_people_see_figures_notes_and_noise() -> None:
    """The table names every figure; what must be known to judge it stands below."""
    text = show(as_json=False)
    for part in ("a_ms", "p50 1.250", "p99 2.500", "count", "[simulated] engine", "expect noise"):
        assert part in text
