"""``mesh simulate`` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli import app
from loadgen.compare import compare
from loadgen.report import read_json
from loadgen.traces import TraceEntry, write_trace

_FLEET = """
model = "m"
[[workers]]
name = "p"
role = "prefill"
profile = "h100-llama-8b"
[[workers]]
name = "d"
role = "decode"
profile = "h100-llama-8b"
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(_FLEET)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    entries = [
        TraceEntry(
            timestamp=100.0 * number,
            input_length=1024,
            output_length=8,
            hash_ids=(1, 2 + number),
            tenant="ab"[number % 2],
        )
        for number in range(20)
    ]
    write_trace(entries, path)
    return path


def _run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", *map(str, args)])
    return done.exit_code, done.output


def test_a_report_says_that_it_is_simulated_everywhere(
    fleet: Path, trace: Path, tmp_path: Path
) -> None:
    """On the screen, in JSON, Markdown and HTML; the JSON is what mesh load compare reads, and the
    page shows the pools over time."""
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "md")}
    code, shown = _run(
        "--fleet", fleet, "--trace", trace, "--slo-ttft-ms", 500, "--slo-tbt-ms", 50,
        "--json", files["json"], "--html", files["html"], "--markdown", files["md"],
    )  # fmt: skip
    assert code == 0, shown
    for text in (shown, *(path.read_text() for path in files.values())):
        assert "simulated" in text
    assert "Load of the pools over time" in files["html"].read_text()
    told = json.loads(files["json"].read_text())
    assert told["simulated"] is True
    assert told["summary"]["num_completed"] == 20
    assert told["goodput_share"] == 1.0
    assert {worker["name"] for worker in told["workers"]} == {"p-0", "d-0"}
    assert set(told["by_tenant"]) == {"a", "b"}
    report = read_json(files["json"])
    assert not compare(report, report).differences


def test_a_rate_is_kept(fleet: Path, trace: Path, tmp_path: Path) -> None:
    """A trace's own times are stretched, a recipe makes more requests in the same time."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'duration_s = 10\n[[part]]\nkind = "no-reuse"\nrate = 1\ninput_len = 64\noutput_len = 4\n'
    )
    for path, least, most in ((trace, 20, 20), (recipe, 30, 75)):
        out = tmp_path / "out.json"
        code, shown = _run("--fleet", fleet, "--trace", path, "--rate", 5, "--json", out)
        assert code == 0, shown
        told = json.loads(out.read_text())
        assert told["offered_per_s"] == pytest.approx(5, rel=0.5)
        assert least <= told["summary"]["num_sent"] <= most


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--rate", "0", "rate"),
        ("--scale", "0", "scale"),
        ("--routers", "0", "routers"),
        ("--slo-ttft-ms", "-1", "slo_ttft_ms"),
        ("--json", "/no/such/folder/x.json", "json"),
        ("--trace", "/no/such/trace.jsonl", "trace"),
        ("--fleet", "/no/such/fleet.toml", "fleet"),
        ("--policy", "best", "policy"),
    ],
)
def test_wrong_options_are_named(
    fleet: Path, trace: Path, option: str, value: str, named: str
) -> None:
    """One line that says which, and exit code 2."""
    given = {"--fleet": str(fleet), "--trace": str(trace), option: value}
    code, shown = _run(*(word for pair in given.items() for word in pair))
    assert code == 2, shown
    assert named in shown
    assert "Traceback" not in shown
