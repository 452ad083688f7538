"""Counts, table and JSON of a chaos run."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from loadgen.chaos.answer import Answer
from loadgen.chaos.report import ChaosReport, Tally, spread
from schemas.tokens import Usage

USAGE = Usage(prompt_tokens=2, completion_tokens=3)
KEYS = {
    "faults", "streams", "lost_tokens", "duplicate_tokens", "wrong_tokens", "usage_errors",
    "failed_requests", "hung_requests", "leaked_blocks", "leaked_processes", "recovery_s",
}  # fmt: skip


def answer(*ids: int, usage: Usage | None = USAGE) -> Answer:
    made = Answer(1)
    made.ids[0] = list(ids)
    made.complete(usage, 1.0)
    return made


def failed() -> Answer:
    made = Answer(1)
    made.fail("engine_failed", "no")
    return made


@pytest.mark.parametrize(
    ("got", "column", "count"),
    [
        (answer(1, 3), "lost_tokens", 1),
        (answer(1, 1, 2, 3), "duplicate_tokens", 1),
        (answer(1, 9, 3), "wrong_tokens", 1),
        (answer(1, 2, 3, usage=None), "usage_errors", 1),
        (failed(), "failed_requests", 1),
        (Answer(1), "hung_requests", 1),
    ],
)
def test_each_trouble_has_its_column(got: Answer, column: str, count: int) -> None:
    """It is counted there, nowhere else, and the run is not clean any more."""
    tally = Tally()
    assert tally.judge(answer(1, 2, 3), got)
    assert not tally.is_clean
    content = tally.content()
    assert content[column] == count
    others = {k: v for k, v in content.items() if k not in (column, "streams", "recovery_s")}
    assert not any(others.values())


def test_a_right_stream_is_no_trouble() -> None:
    """Only streams and faults are counted; they keep a run clean."""
    tally = Tally(faults=1)
    assert tally.judge(answer(1, 2, 3), answer(1, 2, 3)) == ""
    assert (tally.streams, tally.is_clean) == (1, True)


@pytest.mark.parametrize("column", ["leaked_blocks", "leaked_processes"])
def test_a_leak_makes_a_run_fail(column: str) -> None:
    """Also where every token was right."""
    assert not Tally(**{column: 1}).is_clean


def test_all_is_the_sum_of_every_fault() -> None:
    """And of what belongs to no fault; the JSON has the keys that were promised."""
    report = ChaosReport(engine="simulated", settings={})
    report.of("kill-decode", "kill").add(Tally(faults=2, streams=5, recoveries_s=[0.1, 0.3]))
    report.of("kill-decode", "kill").add(Tally(faults=1, lost_tokens=1))
    report.of("freeze-decode", "freeze").add(Tally(faults=1, streams=2, recoveries_s=[2.0]))
    report.at_end.leaked_processes = 1
    content = msgspec.json.decode(msgspec.json.encode(report.content()))
    assert content.keys() >= KEYS
    assert content["by_fault"]["kill-decode"].keys() == KEYS
    assert (content["faults"], content["streams"], content["lost_tokens"]) == (4, 7, 1)
    assert content["leaked_processes"] == 1
    assert content["recovery_s"]["max"] == 2.0
    assert content["recovery_by_kind_s"]["kill"] == {"p50": 0.2, "p99": 0.298, "max": 0.3}
    assert content["engine"] == "simulated"


def test_the_table_says_which_engine_and_shows_every_fault() -> None:
    """A figure of the simulated engine says so."""
    report = ChaosReport(engine="simulated", settings={})
    report.of("kill-decode", "kill").add(Tally(faults=1, streams=11, recoveries_s=[0.25]))
    out = io.StringIO()
    Console(file=out, width=150).print(report.table())
    assert "simulated engine" in out.getvalue()
    assert "kill-decode" in out.getvalue()
    assert "0.25" in out.getvalue()


def test_groups_have_rows_of_their_own() -> None:
    """Killed and frozen are promised different things; a frozen broker is none of both."""
    report = ChaosReport(engine="simulated", settings={})
    report.of("kill-decode", "kill").add(Tally(faults=1, streams=3, recoveries_s=[0.25]))
    report.of("kill-bridge", "kill").add(Tally(faults=1, streams=4, recoveries_s=[0.75]))
    report.of("freeze-broker", "freeze-broker").add(Tally(faults=1, recoveries_s=[0.4]))
    out = io.StringIO()
    Console(file=out, width=150).print(report.table())
    [killed] = [line for line in out.getvalue().splitlines() if "all killed" in line]
    assert [cell.strip() for cell in killed.split("│")][2:4] == ["2", "7"]
    assert "0.50" in killed
    assert "frozen broker, from its thaw" in out.getvalue()
    assert "all frozen" not in out.getvalue()


def test_no_recovery_has_no_percentile() -> None:
    """Rather than a zero that reads as a fast one."""
    assert spread([]) == {"p50": None, "p99": None, "max": None}
