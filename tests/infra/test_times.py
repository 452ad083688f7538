import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.times import Times
from schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "changed"),
    [
        ("beat_s", {"beat_s": 0.0}),
        ("lease_s", {"lease_s": "10"}),
        ("dead_s", {"dead_s": 1.0}),
        ("pull_expiry_s", {"pull_expiry_s": 0.6}),
        ("ack_sample_s", {"ack_sample_s": 0.7}),
        ("ack_wait_s", {"ack_wait_s": 1.0}),
        ("lease_s", {"lease_s": 6.0}),
        ("resume_window_s", {"resume_window_s": 9.0}),
        ("duplicate_window_s", {"duplicate_window_s": 19.0}),
        ("default_deadline_s", {"default_deadline_s": 1000.0}),
        ("token_stream_age_s", {"token_stream_age_s": 800.0}),
    ],
)
def test_a_broken_relation_names_its_key(key, changed):
    """Times that do not fit together are refused at construction."""
    with pytest.raises(ConfigError) as error:
        Times(**changed)
    assert error.value.param == key


@given(st.floats(0.01, 100))
def test_scaling_keeps_the_relations(factor):
    """A mesh that is faster or slower in all its times is as valid; single calls keep theirs."""
    scaled = Times().scaled(factor)
    assert scaled.beat_s == pytest.approx(0.5 * factor)
    assert scaled.call_timeout_s == Times().call_timeout_s
