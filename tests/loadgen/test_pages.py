"""The report as a page and as Markdown, two of them compared, and the stages of a mesh."""

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from loadgen.compare import compare
from loadgen.html_report import html_report
from loadgen.markdown_report import markdown_report
from loadgen.measure import RequestResult
from loadgen.recorder import Recorder
from loadgen.report import LoadReport, make_report, read_json, write_json
from loadgen.stages import StageTime, stage_times
from schemas.errors import ConfigError
from schemas.tokens import Usage
from tests.loadgen.test_report import MACHINE, SETTINGS, recorder

STAGES = {"engine step": StageTime(num=3, mean_ms=12.5, total_s=0.0375)}


class Tags(HTMLParser):
    """Counts what a page is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.loaded += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]


def made(kept: Recorder, **changes: object) -> LoadReport:
    report = make_report(SETTINGS, kept, MACHINE, is_interrupted=False, stages=STAGES)
    return msgspec.structs.replace(report, **changes)


def test_the_page_holds_tables_and_plots_and_loads_nothing() -> None:
    """One file that can be mailed: five plots as SVG, no script, no link to elsewhere."""
    kept = recorder()
    page = html_report(made(kept), kept)
    tags = Tags()
    tags.feed(page)
    assert tags.opened.count("svg") == 5
    assert "script" not in tags.opened
    assert tags.loaded == []
    for text in ("TTFT", "requests/s", "engine step", "12.50", "queue_full"):
        assert text in page


def test_what_a_server_says_is_no_markup() -> None:
    """An error message with tags in it is shown, not obeyed."""
    kept = recorder()
    bad = RequestResult(number=9, output_len=1, sent_s=1.0)
    bad.fail("odd", "<script>alert(1)</script> | x")
    kept.results.append(bad)
    report = made(kept)
    assert "<script>alert" not in html_report(report, kept)
    assert "&lt;script&gt;" in html_report(report, kept)
    assert "\\| x" in markdown_report(report)


def test_a_run_without_an_answer_has_a_page_too() -> None:
    """Empty plots instead of an error: the page says what failed."""
    kept = Recorder(started_s=0.0, ended_s=1.0)
    failed = RequestResult(number=0, output_len=1, sent_s=0.5)
    failed.fail("connection", "refused")
    kept.results.append(failed)
    assert "connection" in html_report(made(kept), kept)


def test_markdown_has_the_figures_of_the_table() -> None:
    """Latencies, rates, stages, errors, each as a table that renders."""
    text = markdown_report(made(recorder()))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert any(line.startswith("| TTFT | 48.50 |") for line in rows)
    assert "| engine step | 3 | 12.50 | 0.04 |" in rows
    assert any(line.startswith("| queue_full | 1 |") for line in rows)


def test_tenants_of_a_trace_are_told_apart() -> None:
    """A summary for each, when there are several; one tenant alone has no table of its own."""
    kept = recorder()
    assert made(kept).by_tenant == {}
    kept.results[0].tenant = "small"
    by_tenant = made(kept).by_tenant
    assert {name: one.num_sent for name, one in by_tenant.items()} == {"": 2, "small": 1}
    assert "| small |" in markdown_report(made(kept))


def test_a_comparison_has_ratios_and_names_what_differs() -> None:
    """Second / first for each figure; other settings, a busy machine and an overloaded generator
    are said, since they make the ratio one of apples and pears."""
    first, slow = recorder(), recorder((0.001, 0.002, 0.0))
    for result in slow.results:
        result.event_s = type(result.event_s)("d", [at + 0.05 for at in result.event_s])
    other = made(slow, settings=made(slow).settings | {"rate": 20.0}, slo_ms={})
    compared = compare(made(first), other)
    ttft = next(row for row in compared.figures if row.figure == "TTFT p50")
    assert ttft.first is not None
    assert ttft.second is not None
    assert ttft.second - ttft.first == pytest.approx(50, abs=1)
    assert ttft.ratio == pytest.approx(ttft.second / ttft.first)
    assert ttft.is_less_better
    assert any(line.startswith("rate: 10.0 and 20.0") for line in compared.differences)
    assert any(line.startswith("slo") for line in compared.differences)
    same = compare(made(first), made(first))
    assert same.differences == ()
    assert all(row.ratio in (None, 1.0) for row in same.figures)


def test_a_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    """Missing, or of another kind: an error that names the file."""
    (tmp_path / "x.json").write_text("{}")
    for name in ("x.json", "y.json"):
        with pytest.raises(ConfigError, match=name):
            read_json(tmp_path / name)
    write_json(made(recorder()), tmp_path / "r.json")
    assert read_json(tmp_path / "r.json").stages == STAGES


def test_stages_are_what_was_added_between_two_readings() -> None:
    """A stage that was not passed is left out, and one whose process began anew."""
    before = {"a": (10.0, 1.0), "b": (5.0, 2.0), "c": (9.0, 9.0)}
    after = {"a": (14.0, 1.2), "b": (5.0, 2.0), "c": (1.0, 0.1), "d": (1.0, 0.5)}
    times = stage_times(before, after)
    assert times["a"] == StageTime(num=4, mean_ms=50.0, total_s=0.2)
    assert set(times) == {"a", "d"}


def test_usage_is_counted_per_tenant() -> None:
    """Each tenant's tokens are its own."""
    kept = recorder()
    kept.results[1].tenant = "small"
    kept.results[1].usage = Usage(prompt_tokens=100, completion_tokens=3)
    assert made(kept).by_tenant["small"].num_prompt_tokens == 100
