"""The per-token histogram tells a scrape the same as the library's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from infra.tally import TallyHistogram

BOUNDS = (0.001, 0.01, 0.1, 1)
VALUES = st.floats(0, 5) | st.sampled_from(BOUNDS)


@given(values=st.lists(VALUES))
def test_it_counts_like_the_librarys_histogram(values: list[float]) -> None:
    """For any values, bounds included: the same samples, but for the time of creation."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyHistogram("gap_seconds", "Gaps", registry=ours, buckets=BOUNDS)
    histogram = Histogram("gap_seconds", "Gaps", registry=theirs, buckets=BOUNDS)
    for value in values:
        tally.observe(value)
        histogram.observe(value)

    def samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
        return [
            (sample.name, sample.labels, sample.value)
            for family in registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    assert samples(ours) == samples(theirs)
