"""A small fleet on a real broker, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from infra.up_plan import mesh_command
from loadgen.recipes import make_trace, read_recipe
from loadgen.report import read_json
from tests.loadgen.simulate_bus.fleets import FLEET, TRACE

PATIENCE_S = 240.0


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """The flags that name a fleet and a trace."""
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "trace.toml").write_text(TRACE)
    return ("--fleet", str(tmp_path / "fleet.toml"), "--trace", str(tmp_path / "trace.toml"))


def simulate(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*mesh_command(), "simulate", *flags], capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_a_small_fleet_answers_every_request_to_the_token(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    """Two processes of six workers: exact counts, figures of each worker, a report that other
    commands read, the processes' logs, and nothing left behind."""
    report, logs = tmp_path / "report.json", tmp_path / "logs"
    done = simulate(
        *files, "--bus", "--workers-per-process", "6", "--time-scale", "2",
        "--json", str(report), "--logs", str(logs), "--markdown", str(tmp_path / "report.md"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "simulated engines on the real bus: 12 workers in 2 processes" in done.stdout
    entries = make_trace(read_recipe(tmp_path / "trace.toml"))
    summary = read_json(report).summary
    assert (summary.num_sent, summary.num_completed, summary.num_failed) == (
        len(entries),
        len(entries),
        0,
    )
    assert summary.num_prompt_tokens == sum(one.input_length for one in entries)
    assert summary.num_output_tokens == sum(one.output_length for one in entries)
    fleet = msgspec.json.decode(report.read_bytes())
    assert fleet["engines"] == "simulated engines on the real bus"
    assert len(fleet["workers"]) == 12
    by_role = {role: line["num_requests"] for role, line in fleet["roles"].items()}
    assert by_role["decode"] >= len(entries)  # and perhaps the one that warms up
    assert set(fleet["cores"]) == {"broker", "control", "generator", "workers"}
    assert sorted(file.name for file in logs.iterdir()) == [
        "control-1.log",
        "crew-1.log",
        "crew-2.log",
    ]
    assert (tmp_path / "report.md").read_text().startswith("## tiny at fleet fleet on the bus")


def test_what_can_not_be_run_is_one_line(tmp_path: Path, files: tuple[str, ...]) -> None:
    """The file and the field are named; nothing is started."""
    (tmp_path / "fleet.toml").write_text(FLEET.replace("count = 6", 'count = "six"', 1))
    done = simulate(*files, "--bus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "$.workers[0].count" in done.stderr
    assert sys.executable not in done.stderr
