"""The budget seen from outside: metrics and log lines."""

from __future__ import annotations

import math

from infra.log import make_logger
from infra.metrics import Metrics
from pipeline.budget import Budget
from pipeline.budget_meter import SHOW_S, BudgetMeter
from pipeline.policy import FixedPolicies
from pipeline.verdict import Admit, Refuse
from tests.pipeline.budget_rig import House, ask, decoder, policy, prefiller
from tests.pipeline.rig import SERVED, LogLines


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_verdicts_are_counted_and_told_once() -> None:
    """Each request that is over budget has one line and one count, also when it waits and is
    asked again; one that is admitted has neither."""
    metrics, lines = Metrics(), LogLines()
    meter = BudgetMeter(metrics, make_logger("test", stream=lines.stream))
    house = House(prefiller(), decoder())
    rules = policy(rungs=("wait", "refuse"), max_wait_s=5.0)
    budget = Budget(
        house.fleet, house, FixedPolicies({"*": rules}), on_verdict=meter.judged
    )  # fmt: skip
    house.budget = budget
    while isinstance(budget.judge(ask(f"r-{len(budget.books)}")), Admit):
        house.admit(ask(f"r-{len(budget.books)}"))
    budget.judge(ask("r-4", now_s=0.1, since_s=0.0))
    assert isinstance(budget.judge(ask("late", now_s=9.0, since_s=0.0)), Refuse)
    assert value(metrics, "mesh_over_budget_requests_total", verdict="wait", shortage="ttft") == 1
    assert value(metrics, "mesh_over_budget_requests_total", verdict="refuse", shortage="ttft") == 1
    assert value(metrics, "mesh_predicted_ttft_seconds_count") == 4
    waits, refused = lines.events("request_over_budget")
    assert (waits["verdict"], waits["request_id"]) == ("wait", "r-4")
    assert refused["retry_after_s"] > 0


def test_budgets_are_shown() -> None:
    """Used and available device time of each pool; of one whose workers are gone nothing."""
    metrics = Metrics()
    meter = BudgetMeter(metrics, make_logger("test"))
    house = House(prefiller("p1"), prefiller("p2"), decoder())
    house.admit(ask("r", num_prompt=500, max_tokens=100))
    meter.show(house.budget, lambda: [SERVED], 0.0)

    def shown(kind: str, what: str) -> float | None:
        return value(metrics, "mesh_budget_seconds", model="tiny", kind=kind, what=what)

    assert (shown("prefill", "used"), shown("prefill", "available")) == (0.5, 4.0)
    assert (shown("decode", "used"), shown("decode", "available")) == (0.1, 0.8 * 30)
    house.budget.settle("r")
    meter.show(house.budget, lambda: [SERVED], SHOW_S / 2)
    assert shown("prefill", "used") == 0.5, "not with every beat"
    meter.show(house.budget, lambda: [SERVED], SHOW_S)
    assert shown("prefill", "used") == shown("decode", "used") == 0.0
    meter.show(house.budget, list, 2 * SHOW_S)
    assert shown("prefill", "available") == 0.0


def test_without_a_promise_there_is_no_end_of_it() -> None:
    """What is available is infinite, and a metric can say so."""
    house = House(prefiller(), decoder(), policy=policy(default_class=""))
    used = house.budget.used(SERVED, 0.0)
    assert used == {"prefill": (0.0, math.inf), "decode": (0.0, math.inf)}
