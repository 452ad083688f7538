"""What the compute budget says of itself: metrics, and a line for each request it degraded."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from infra.log import Logger
from infra.metrics import Metrics
from pipeline.budget import Budget
from pipeline.verdict import Admit, Ask, Clamp, Fallback, Refuse, Verdict, Wait
from schemas import subjects

SHOW_S = 1.0
_ADMITTED = (Admit, Clamp)
_KINDS: dict[type[Verdict], str] = {
    Clamp: "clamp", Fallback: "fallback", Wait: "wait", Refuse: "refuse",
}  # fmt: skip


class BudgetMeter:
    """Counts verdicts, and shows how full the budgets are."""

    def __init__(self, metrics: Metrics, log: Logger) -> None:
        self._metrics = metrics
        self._log = log
        self._shown: set[str] = set()
        self._shown_s = -math.inf

    def judged(self, ask: Ask, verdict: Verdict) -> None:
        """A verdict was given."""
        if isinstance(verdict, _ADMITTED) and verdict.forecast.ttft_ms is not None:
            self._metrics.predicted_ttft_seconds.observe(verdict.forecast.ttft_ms / 1000)
        if isinstance(verdict, Admit):
            return
        if isinstance(verdict, Wait) and ask.now_s > ask.since_s:
            return  # it was told before
        kind = _KINDS[type(verdict)]
        self._metrics.over_budget.labels(kind, verdict.shortage).inc()
        self._log.info(
            "request_over_budget",
            request_id=ask.request_id,
            served=ask.served,
            verdict=kind,
            shortage=verdict.shortage,
            priority=ask.priority,
            **_facts(ask, verdict),
        )

    def show(self, budget: Budget, pools: Callable[[], Collection[str]], now_s: float) -> None:
        """How much of the budgets of ``pools`` is used, of how much; at most once in ``SHOW_S``,
        so it may be called with every beat."""
        if now_s - self._shown_s < SHOW_S:
            return
        self._shown_s = now_s
        served = set(pools())
        for pool in sorted(self._shown - served):
            self._set(pool, dict.fromkeys(("prefill", "decode"), (0.0, 0.0)))
        for pool in sorted(served):
            self._set(pool, budget.used(pool, now_s))
        self._shown = served

    def _set(self, served: str, budgets: Mapping[str, tuple[float, float]]) -> None:
        model, _ = subjects.split_served(served)
        for kind, (used_ms, available_ms) in budgets.items():
            gauge = self._metrics.budget_seconds
            gauge.labels(model, kind, "used").set(used_ms / 1000)
            gauge.labels(model, kind, "available").set(available_ms / 1000)


def _facts(ask: Ask, verdict: Clamp | Fallback | Wait | Refuse) -> dict[str, object]:
    match verdict:
        case Clamp():
            return {"asked_max_tokens": ask.max_tokens, "max_tokens": verdict.max_tokens}
        case Fallback():
            return {"fallback": verdict.model}
        case Wait():
            return {"wait_s": round(verdict.until_s - ask.now_s, 3)}
        case Refuse():
            return {"retry_after_s": verdict.retry_after_s}
