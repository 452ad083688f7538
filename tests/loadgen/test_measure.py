import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure import Distribution, RequestResult, count_errors, summarize
from schemas.tokens import Usage


def answered(
    *events_s: float, sent_s: float = 100.0, tokens: int | None = None, output_len: int = 0
) -> RequestResult:
    """A completed answer with one token per event, or ``tokens`` as usage says."""
    result = RequestResult(number=0, output_len=output_len, sent_s=sent_s)
    for event_s in events_s:
        result.add_event(sent_s + event_s)
    num_tokens = len(events_s) if tokens is None else tokens
    result.complete(
        Usage(prompt_tokens=7, completion_tokens=num_tokens, cached_tokens=3), is_count_exact=False
    )
    return result


def test_definitions_of_the_four_latencies() -> None:
    """TTFT to the first event, ITL between events, E2E to the last, TPOT over tokens - 1."""
    summary = summarize([answered(0.5, 0.6, 0.9)], wall_s=2.0)
    assert summary.ttft_ms.mean == pytest.approx(500)
    assert summary.itl_ms.num == 2
    assert summary.itl_ms.mean == pytest.approx(200)
    assert summary.itl_ms.max == pytest.approx(300)
    assert summary.e2e_ms.mean == pytest.approx(900)
    assert summary.tpot_ms.mean == pytest.approx((900 - 500) / 2)


def test_tpot_divides_by_tokens_where_an_event_holds_several() -> None:
    """Two events with nine tokens: ITL sees one gap, TPOT eight tokens after the first."""
    summary = summarize([answered(0.5, 0.9, tokens=9)], wall_s=1.0)
    assert summary.itl_ms.mean == pytest.approx(400)
    assert summary.tpot_ms.mean == pytest.approx(400 / 8)
    assert summary.num_output_tokens == 9


def test_end_is_the_event_with_the_finish_reason() -> None:
    """Tokens without text after the last event count up to the finish reason."""
    result = answered(0.5, 0.6)
    result.end_s = 100.8
    assert result.e2e_s == pytest.approx(0.8)
    assert result.tpot_s == pytest.approx(0.3)


def test_a_single_token_has_no_tpot_and_no_gap() -> None:
    """One token gives TTFT and E2E, and leaves TPOT and ITL without an observation."""
    summary = summarize([answered(0.25)], wall_s=1.0)
    assert summary.ttft_ms.mean == summary.e2e_ms.mean == pytest.approx(250)
    assert summary.tpot_ms == summary.itl_ms == Distribution(num=0)


def test_an_empty_run_has_figures_all_the_same() -> None:
    """No request at all: zeros and nothing to take a percentile of."""
    summary = summarize([], wall_s=0.0, slo_ms={"ttft": 1})
    assert summary.requests_per_s == summary.output_tokens_per_s == summary.goodput_per_s == 0
    assert summary.ttft_ms == Distribution(num=0)
    assert summary.ttft_ms.p99 is None


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=200))
def test_percentiles_follow_linear_interpolation(values_s: list[float]) -> None:
    """p50, p90 and p99 lie at rank q*(n-1) of the sorted values, between two neighbours."""
    ordered = sorted(value * 1e3 for value in values_s)

    def expected(share: float) -> float:
        low = int(share * (len(ordered) - 1))
        part = share * (len(ordered) - 1) - low
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * part

    found = Distribution.of_seconds(values_s)
    assert found.num == len(values_s)
    assert found.p50 == pytest.approx(expected(0.5), abs=1e-6)
    assert found.p90 == pytest.approx(expected(0.9), abs=1e-6)
    assert found.p99 == pytest.approx(expected(0.99), abs=1e-6)
    assert found.max == ordered[-1]
    assert found.mean == pytest.approx(float(np.mean(ordered)))


@pytest.mark.parametrize(
    ("tokens_per_event", "told", "is_exact", "kind"),
    [
        ((1, 1), 2, True, ""),
        ((1, 3), 4, True, ""),
        ((1, 1), 3, True, "usage_mismatch"),
        ((1, 1), 3, False, ""),
        ((1, 1), 1, False, "usage_mismatch"),
        ((1, 1), 0, False, "no_tokens"),
        ((), 0, False, "no_tokens"),
        ((), 2, False, "no_tokens"),
    ],
)
def test_usage_is_checked_against_the_events(
    tokens_per_event: tuple[int, ...], told: int, is_exact: bool, kind: str
) -> None:
    """Exact counts must agree; where an event may hold more, usage may only be higher."""
    result = RequestResult(number=0, output_len=2)
    for number, tokens in enumerate(tokens_per_event):
        result.add_event(float(number), tokens)
    result.complete(Usage(prompt_tokens=1, completion_tokens=told), is_count_exact=is_exact)
    assert result.error_kind == kind
    assert result.state == ("failed" if kind else "completed")


def test_without_usage_events_are_counted_and_it_is_said() -> None:
    """A server that sends no usage still gives figures, marked as counted from events."""
    result = RequestResult(number=0, output_len=2)
    result.add_event(1.0)
    result.add_event(2.0)
    result.complete(None, is_count_exact=False)
    summary = summarize([result], wall_s=1.0)
    assert (summary.num_completed, summary.num_without_usage) == (1, 1)
    assert summary.num_output_tokens == 2


def test_failed_and_unfinished_requests_are_counted_but_in_no_latency() -> None:
    """Latencies and rates are of completed requests; the others stand beside them."""
    good, running, failed = (
        answered(0.1, 0.2),
        *(RequestResult(number=n, output_len=2) for n in (1, 2)),
    )
    for result in (running, failed):
        result.add_event(1e6)
    failed.fail("timeout", "too late")
    summary = summarize([good, running, failed], wall_s=2.0, num_skipped=4)
    assert (summary.num_sent, summary.num_completed) == (3, 1)
    assert (summary.num_failed, summary.num_unfinished, summary.num_skipped) == (1, 1, 4)
    assert summary.ttft_ms.num == 1
    assert summary.requests_per_s == pytest.approx(0.5)
    assert summary.output_tokens_per_s == pytest.approx(1.0)
    assert (summary.num_prompt_tokens, summary.num_cached_tokens) == (7, 3)


def test_errors_are_counted_by_kind_with_the_first_message() -> None:
    """The most frequent kind comes first; its first message is the example."""
    results = [RequestResult(number=n, output_len=1) for n in range(3)]
    for result, kind in zip(results, ("a", "b", "b"), strict=True):
        result.fail(kind, f"message {result.number}")
    errors = count_errors(results)
    assert list(errors) == ["b", "a"]
    assert (errors["b"].num, errors["b"].example) == (2, "message 1")


def test_goodput_counts_requests_that_met_every_limit() -> None:
    """A request over any one limit is not good; a single token meets any TPOT."""
    fast, slow_start = answered(0.1, 0.2), answered(0.5, 0.6)
    slow_tokens, single = answered(0.1, 0.9), answered(0.1)
    limits = {"ttft": 200.0, "tpot": 150.0, "e2e": 1000.0}
    found = [result.meets(limits) for result in (fast, slow_start, slow_tokens, single)]
    assert found == [True, False, False, True]
    failed = answered(0.1, 0.2)
    failed.fail("usage_mismatch", "")
    assert not failed.meets(limits)
    summary = summarize([fast, slow_start, slow_tokens, single], wall_s=4.0, slo_ms=limits)
    assert summary.goodput_per_s == pytest.approx(0.5)
    assert summarize([fast], wall_s=1.0).goodput_per_s is None


def test_short_answers_are_counted() -> None:
    """An answer with fewer tokens than asked for is no error, but it is said."""
    results = [answered(0.1, 0.2, output_len=2), answered(0.1, output_len=2)]
    assert summarize(results, wall_s=1.0).num_short == 1
