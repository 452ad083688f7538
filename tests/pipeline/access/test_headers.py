"""``x-ratelimit-*`` as clients parse them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.access.bucket import Bucket
from pipeline.access.headers import duration, rate_headers

_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0001, "1ms"), (0.017, "17ms"), (0.9995, "1s"), (1, "1s"), (1.5, "1.5s"),
        (59.9999, "1m0s"), (60, "1m0s"), (72.5, "1m12.5s"), (360, "6m0s"), (3600, "1h0m0s"),
        (86400.25, "24h0m0.25s"),
    ],
)  # fmt: skip
def test_times_as_openai_writes_them(seconds: float, text: str) -> None:
    """Go's form, never earlier than true."""
    assert duration(seconds) == text


@given(st.floats(0, 10**7))
def test_a_duration_reads_back_as_the_time_rounded_up(seconds: float) -> None:
    """What a client parses is at least the time, and less than two milliseconds more."""
    parts = re.findall(r"([0-9.]+)(ms|h|m|s)", duration(seconds))
    read = sum(float(number) * _UNITS[unit] for number, unit in parts)
    assert -1e-6 <= read - seconds < 0.002


def test_three_headers_at_the_moment_of_writing() -> None:
    """What drained since the bucket was last seen is there again; the bucket is left alone."""
    bucket = Bucket(level=60.0, at_s=100.0)
    assert rate_headers("requests", 60, bucket, 130.0) == [
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"30"),
        (b"x-ratelimit-reset-requests", b"30s"),
    ]
    assert bucket.level == 60.0
    assert rate_headers("tokens", None, bucket, 130.0) == []
