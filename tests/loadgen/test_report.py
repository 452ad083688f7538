import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.machine import MachineNote
from loadgen.measure import RequestResult
from loadgen.recorder import Recorder
from loadgen.report import LoadReport, make_report, print_report, read_json, write_json
from loadgen.settings import LoadSettings
from schemas.tokens import Usage
from tests.loadgen.fakes import WORKLOAD

SETTINGS = LoadSettings(
    target="nats://user:secret@127.0.0.1:4222",
    model="m",
    rate=10.0,
    slo_ms={"ttft": 100.0},
    api_key="very-secret",
)
MACHINE = MachineNote(num_cores=2, load_1min=0.1, is_busy=False, system="Linux x", python="3.11")


def recorder(lags_s: tuple[float, ...] = (0.001, 0.002, 0.0)) -> Recorder:
    """Two completed requests, then one refused, sent ``lags_s`` after they were due."""
    kept = Recorder(started_s=0.0, ended_s=2.0, started_unix_ms=1)
    for number, lag_s in enumerate(lags_s):
        result = kept.begin(WORKLOAD.request(number), due_s=1.0)
        result.sent_s = 1.0 + lag_s
        if number == len(lags_s) - 1:
            result.fail("queue_full", "[red]full[/red]")
        else:
            for event in range(3):
                result.add_event(1.05 + event / 100)
            result.complete(Usage(prompt_tokens=4, completion_tokens=3), is_count_exact=True)
        kept.end(result)
    kept.loop_lag_s.append(0.001)
    return kept


def report(kept: Recorder, *, is_interrupted: bool = False) -> LoadReport:
    return make_report(SETTINGS, kept, MACHINE, is_interrupted=is_interrupted)


def shown(of: LoadReport) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_report(of, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_holds_everything_and_reads_back(tmp_path: Path) -> None:
    """The file has settings, every latency with mean and percentiles, rates, errors, own cost."""
    made = report(recorder())
    write_json(made, tmp_path / "r.json")
    assert read_json(tmp_path / "r.json") == made
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["schema"] == "load-report/1"
    summary = content["summary"]
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert summary[name].keys() == {"num", "mean", "p50", "p90", "p99", "max"}
        assert summary[name]["num"] > 0
    assert summary["requests_per_s"] == pytest.approx(1.0)
    assert summary["output_tokens_per_s"] == pytest.approx(3.0)
    assert summary["goodput_per_s"] == pytest.approx(1.0)
    assert summary["errors"] == {"queue_full": {"num": 1, "example": "[red]full[/red]"}}
    assert content["generator"]["lag_ms"]["num"] == 3
    assert content["settings"]["rate"] == 10.0
    assert content["settings"]["seed"] == 0
    assert content["machine"]["num_cores"] == 2
    assert "client" in content["measuring_point"]


def test_no_secret_is_written(tmp_path: Path) -> None:
    """Neither the API key nor the broker's password gets into a report."""
    made = report(recorder())
    write_json(made, tmp_path / "r.json")
    assert "secret" not in (tmp_path / "r.json").read_text() + shown(made)


def test_the_table_names_every_figure() -> None:
    """People see the four latencies, the rates, the lag and the errors, markup left as it came."""
    text = shown(report(recorder()))
    for part in ("TTFT", "ITL", "TPOT", "E2E", "p50", "p90", "p99", "requests/s", "tokens/s"):
        assert part in text
    for part in ("2 completed, 1 failed", "scheduling lag", "queue_full", "[red]full[/red]"):
        assert part in text
    assert "within the SLO" in text
    assert "warning" not in text


def test_a_late_generator_is_called_the_bottleneck() -> None:
    """More than one send in a hundred over 10 ms late: the report says whose fault it was."""
    late = report(recorder(lags_s=(0.05, 0.0, 0.0)))
    assert late.generator.num_late == 1
    assert late.generator.bottleneck
    assert "the generator was the bottleneck" in shown(late)
    assert report(recorder()).generator.bottleneck == ""


def test_a_generator_that_used_its_whole_core_is_the_bottleneck() -> None:
    """One thread that is always busy can't have measured the server."""
    busy = recorder()
    busy._cpu_ended_s = busy._cpu_started_s + 1.9
    made = report(busy)
    assert made.generator.cpu_share == pytest.approx(0.95)
    assert made.generator.cpu_us_per_token == pytest.approx(1.9 / 6 * 1e6)
    assert "95%" in made.generator.bottleneck


def test_doubts_are_said() -> None:
    """Interrupted runs, skipped, unfinished, short and uncounted answers each bring a warning."""
    kept = recorder()
    kept.num_skipped = 5
    kept.results.append(RequestResult(number=9, output_len=3))
    kept.results[0].output_len = 4
    kept.results[1].usage = None
    text = shown(report(kept))
    for part in ("5 requests were due", "unfinished requests", "1 answers were shorter", "usage"):
        assert part in text
    assert "interrupted" in shown(report(kept, is_interrupted=True))


def test_an_empty_run_can_be_shown(tmp_path: Path) -> None:
    """Ctrl-C before the first answer: dashes instead of figures, and a valid file."""
    empty = report(Recorder(started_s=0.0, ended_s=0.0), is_interrupted=True)
    assert "-" in shown(empty)
    write_json(empty, tmp_path / "r.json")
    assert read_json(tmp_path / "r.json") == empty


def test_the_machine_note_says_when_it_is_busy() -> None:
    """The note is of this machine, and its line warns exactly when it is busy."""
    note = MachineNote.now()
    assert note.num_cores >= 1
    assert ("expect noise" in note.text) == note.is_busy
