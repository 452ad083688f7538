"""Where a prompt's KV came from: every token once, never more than there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.metrics import Metrics
from workers.kv.origins import OriginCounts, Origins, origins_of

SOME = st.integers(0, 3000)


@given(st.integers(1, 2000), SOME, SOME, SOME, SOME, SOME)
def test_the_parts_sum_to_the_prompt(
    num_prompt: int, cached: int, promoted: int, disk: int, remote: int, imported: int
) -> None:
    """Whatever is claimed: no part is negative, cached is never above the prompt."""
    origins = origins_of(
        num_prompt,
        num_cached=cached,
        num_promoted=promoted,
        num_disk=disk,
        num_remote=remote,
        num_imported=imported,
    )
    parts = [origins.device, origins.host, origins.disk, origins.remote]
    assert min(*parts, origins.handed_over, origins.computed) >= 0
    assert sum(parts) + origins.handed_over + origins.computed == num_prompt
    assert origins.cached == sum(parts)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"num_cached": 0}, (0, 0, 0, 0, 0, 100)),
        ({"num_cached": 64}, (64, 0, 0, 0, 0, 36)),
        ({"num_cached": 64, "num_promoted": 48}, (16, 48, 0, 0, 0, 36)),
        ({"num_cached": 64, "num_promoted": 64, "num_remote": 32}, (0, 32, 0, 32, 0, 36)),
        (
            {"num_cached": 96, "num_promoted": 96, "num_disk": 32, "num_remote": 48},
            (0, 16, 32, 48, 0, 4),
        ),
        ({"num_cached": 0, "num_remote": 64}, (0, 0, 0, 0, 0, 100)),  # brought, and not used
        ({"num_cached": 0, "num_imported": 101}, (0, 0, 0, 0, 100, 0)),
    ],
)
def test_each_token_counts_where_it_came_from(
    found: dict[str, int], expected: tuple[int, ...]
) -> None:
    """What was brought for the prompt counts as far as it was used; handed over is not cached."""
    origins = origins_of(100, **found)
    assert origins == Origins(
        **dict(
            zip(
                ("device", "host", "disk", "remote", "handed_over", "computed"),
                expected,
                strict=True,
            )
        )
    )


def test_they_are_counted_by_source() -> None:
    """What dashboards add up is what log lines say."""
    metrics = Metrics()
    OriginCounts(metrics).add(origins_of(100, num_cached=64, num_promoted=64, num_remote=32))
    by_source = metrics.prompt_source_tokens
    assert by_source.labels("remote")._value.get() == 32
    assert by_source.labels("host")._value.get() == 32
    assert by_source.labels("computed")._value.get() == 36
    assert metrics.tokens_cached._value.get() == 64
