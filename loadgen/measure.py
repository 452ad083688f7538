"""What happened to each request, and the figures made of it. No clock, no I/O.

All times are of one monotonic clock, in the process that sends, so the measuring point is the
client and not the bridge:

    due       when the schedule wanted the request sent (open loop)
    sent      just before the request was handed to the target
    event     when a token event was read: an SSE event with text, or a TokenDelta of the bus
    end       when the event was read that names the finish reason; mostly the last of them

    TTFT = first event - sent          E2E  = end - sent
    ITL  = gap of two events           TPOT = (E2E - TTFT) / (tokens - 1), from two tokens on
    lag  = sent - due: the generator's own lateness, never counted as the server's

Latencies are of completed requests only; failed and unfinished ones are counted beside them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from schemas.tokens import Usage

State = Literal["running", "completed", "failed"]
_TBT_SHARE = 0.99  # of a request's gaps that must be within a TBT limit


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """What one request has brought so far; a target fills it while the answer streams in."""

    number: int
    output_len: int
    tenant: str = ""
    due_s: float | None = None  # open loop only
    sent_s: float = 0.0
    event_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: float | None = None  # None: no finish reason came, or not yet
    num_counted_tokens: int = 0  # as far as the events say
    usage: Usage | None = None
    state: State = "running"
    error_kind: str = ""
    error_message: str = ""

    def add_event(self, now_s: float, num_tokens: int = 1) -> None:
        """A token event that holds ``num_tokens``, or at least one where a target can't tell."""
        self.event_s.append(now_s)
        self.num_counted_tokens += num_tokens

    def complete(self, usage: Usage | None, *, is_count_exact: bool) -> None:
        """The answer ended well; ``usage`` is what the server says it holds.

        Events and usage must fit: as many tokens as counted where the count is exact, otherwise
        at least as many. If not, the request has failed with ``usage_mismatch``.
        """
        self.usage = usage
        if not self.event_s or self.num_tokens == 0:
            self.fail("no_tokens", "the answer ended without a token")
            return
        counted = self.num_counted_tokens
        told = counted if usage is None else usage.completion_tokens
        if told < counted or (is_count_exact and told != counted):
            self.fail("usage_mismatch", f"{counted} tokens came, usage says {told}")
            return
        self.state = "completed"

    def fail(self, kind: str, message: str) -> None:
        """The request failed; ``kind`` comes from a small set, ``message`` is for people."""
        self.state = "failed"
        self.error_kind = kind
        self.error_message = message

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer: what usage says, or else as many as the events show."""
        return self.num_counted_tokens if self.usage is None else self.usage.completion_tokens

    @property
    def lag_s(self) -> float | None:
        """How late it was sent; None where nothing was scheduled."""
        return None if self.due_s is None else max(0.0, self.sent_s - self.due_s)

    @property
    def ttft_s(self) -> float:
        """Sent to first event. Only with at least one event."""
        return self.event_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Sent to end, or to the last event where no end was told. Only with an event."""
        return (self.event_s[-1] if self.end_s is None else self.end_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)

    @property
    def tbt_s(self) -> float:
        """The gap between two events that 99 of 100 of its gaps do not exceed; 0 for one event."""
        gaps = np.diff(np.frombuffer(self.event_s, dtype=np.float64))
        if not len(gaps):
            return 0.0
        place = math.ceil(_TBT_SHARE * len(gaps)) - 1
        return float(np.partition(gaps, place)[place])

    def meets(self, slo_ms: dict[str, float]) -> bool:
        """Whether it completed within every limit; a single token meets any TPOT and TBT."""
        if self.state != "completed":
            return False
        times_s = {
            "ttft": lambda: self.ttft_s,
            "tpot": lambda: self.tpot_s or 0.0,
            "tbt": lambda: self.tbt_s,
            "e2e": lambda: self.e2e_s,
        }
        return all(times_s[key]() * 1e3 <= limit_ms for key, limit_ms in slo_ms.items())


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of ``num`` observations; all None when there is none.

    Percentiles are interpolated linearly between the two nearest observations.
    """

    num: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of_seconds(
        cls, values_s: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float64]]
    ) -> Distribution:
        """The distribution of ``values_s``, given in seconds, in any order."""
        if len(values_s) == 0:
            return cls(num=0)
        values_ms = np.asarray(values_s, dtype=np.float64) * 1e3
        p50, p90, p99 = np.percentile(values_ms, (50, 90, 99)).tolist()
        return cls(
            num=len(values_ms),
            mean=float(values_ms.mean()),
            p50=p50,
            p90=p90,
            p99=p99,
            max=float(values_ms.max()),
        )


class ErrorCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one kind of error came, and the first message of it."""

    num: int
    example: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run."""

    wall_s: float  # from the start of measuring to the end of the last request
    num_sent: int
    num_completed: int
    num_failed: int
    num_unfinished: int  # still running when the run was stopped
    num_skipped: int  # due, but never sent: the limit of requests in flight was reached
    num_short: int  # completed with fewer tokens than asked for
    num_without_usage: int  # completed, with tokens counted from events
    num_prompt_tokens: int  # as the server counts, of completed requests
    num_cached_tokens: int
    num_output_tokens: int
    errors: dict[str, ErrorCount]
    ttft_ms: Distribution
    itl_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    requests_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float | None  # requests per second that met every SLO; None without an SLO


def summarize(
    results: Sequence[RequestResult],
    *,
    wall_s: float,
    num_skipped: int = 0,
    slo_ms: dict[str, float] | None = None,
) -> Summary:
    """The figures of ``results``, which were measured in ``wall_s`` seconds."""
    done = [result for result in results if result.state == "completed"]
    usages = [result.usage for result in done if result.usage is not None]
    num_output_tokens = sum(result.num_tokens for result in done)
    tpots_s = [tpot_s for result in done if (tpot_s := result.tpot_s) is not None]
    return Summary(
        wall_s=wall_s,
        num_sent=len(results),
        num_completed=len(done),
        num_failed=sum(result.state == "failed" for result in results),
        num_unfinished=sum(result.state == "running" for result in results),
        num_skipped=num_skipped,
        num_short=sum(result.num_tokens < result.output_len for result in done),
        num_without_usage=len(done) - len(usages),
        num_prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        num_cached_tokens=sum(usage.cached_tokens for usage in usages),
        num_output_tokens=num_output_tokens,
        errors=count_errors(results),
        ttft_ms=Distribution.of_seconds([result.ttft_s for result in done]),
        itl_ms=Distribution.of_seconds(gaps_s(done)),
        tpot_ms=Distribution.of_seconds(tpots_s),
        e2e_ms=Distribution.of_seconds([result.e2e_s for result in done]),
        requests_per_s=_per_s(len(done), wall_s),
        output_tokens_per_s=_per_s(num_output_tokens, wall_s),
        goodput_per_s=_per_s(sum(r.meets(slo_ms) for r in done), wall_s) if slo_ms else None,
    )


def count_errors(results: Iterable[RequestResult]) -> dict[str, ErrorCount]:
    """Failed requests by kind, the most frequent first."""
    counts: dict[str, ErrorCount] = {}
    for result in results:
        if result.state == "failed":
            kind, seen = result.error_kind, counts.get(result.error_kind)
            example = seen.example if seen else result.error_message
            counts[kind] = ErrorCount(num=seen.num + 1 if seen else 1, example=example)
    return dict(sorted(counts.items(), key=lambda item: -item[1].num))


def gaps_s(results: Sequence[RequestResult]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The gaps between token events of each of ``results``, one after the other, in seconds."""
    gaps = [np.diff(np.frombuffer(r.event_s, dtype=np.float64)) for r in results]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _per_s(count: int, wall_s: float) -> float:
    return count / wall_s if wall_s > 0 else 0.0
