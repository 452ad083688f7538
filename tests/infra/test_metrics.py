"""The list of metrics: names and labels follow the rules."""

from __future__ import annotations

import re

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from infra.metrics import Metrics

_UNITS = ("seconds", "bytes", "tokens", "requests", "messages", "blocks", "sequences", "leases",
          "workers", "letters", "takeovers", "handled", "generated", "computed", "cached",
          "admitted", "refused", "ended", "resent", "reconnects", "fetches", "lends", "changes",
          "gaps", "snapshots", "evicted", "lookups", "placements", "ratio")  # fmt: skip
_LABELS = {
    "code", "outcome", "source", "stage", "state", "role", "tier", "transport", "what", "kind",
    "reason", "verdict", "shortage", "part",
    "model", "tenant", "priority",  # bounded: as many as are served; the first so many; classes
}  # fmt: skip


def families() -> list[Metric]:
    return list(Metrics().registry.collect())


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_names_and_labels_follow_the_rule(family: Metric) -> None:
    """``mesh_<thing>_<unit>[_total]``, with a help text."""
    assert re.fullmatch(r"mesh_[a-z0-9]+(_[a-z0-9]+)*", family.name)
    assert family.name.endswith(_UNITS)
    assert family.documentation.strip()


def test_labels_are_from_closed_sets() -> None:
    """No label is an id."""
    metrics = Metrics()
    for one in vars(metrics).values():
        labels = getattr(one, "_labelnames", ())
        assert set(labels) <= _LABELS


def test_two_processes_in_one_interpreter_do_not_meet() -> None:
    """Nothing is registered globally."""
    first, second = Metrics(), Metrics()
    first.requests_admitted.inc()
    second.requests_refused.labels(code="queue_full").inc(2)
    assert first.registry.get_sample_value("mesh_requests_admitted_total") == 1
    assert second.registry.get_sample_value("mesh_requests_admitted_total") == 0


def test_the_exposition_can_be_parsed() -> None:
    """What /metrics serves is Prometheus' format, with the process's own facts on demand."""
    metrics = Metrics(process_facts=True)
    metrics.ttft_seconds.observe(0.03)
    names = {
        family.name for family in text_string_to_metric_families(metrics.exposition().decode())
    }
    assert {"mesh_ttft_seconds", "process_resident_memory_bytes"} <= names
