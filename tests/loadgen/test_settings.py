from pathlib import Path
from typing import Any

import pytest

from loadgen.settings import (
    LoadSettings,
    parse_slo,
    parse_tenant_keys,
    parse_vocab,
    public_url,
    user_of,
)
from schemas.errors import ConfigError

GOOD: dict[str, Any] = {"target": "http://127.0.0.1:8000", "model": "m", "rate": 5.0}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"rate": None}, "rate"),
        ({"concurrency": 2}, "rate"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": None, "concurrency": 0}, "concurrency"),
        ({"rate": None, "concurrency": 8193}, "concurrency"),
        ({"target": "127.0.0.1:8000"}, "target"),
        ({"target": "ftp://host"}, "target"),
        ({"target": "http://"}, "target"),
        ({"target": "http://host:99999"}, "target"),
        ({"duration_s": 0.0}, "duration"),
        ({"duration_s": 3601.0}, "duration"),
        ({"num_requests": 0}, "requests"),
        ({"input_len": 0}, "input_len"),
        ({"output_len": -1}, "output_len"),
        ({"max_in_flight": 8193}, "max_in_flight"),
        ({"warmup": -1}, "warmup"),
        ({"seed": -1}, "seed"),
        ({"timeout_s": 0.0}, "timeout"),
        ({"drain_s": float("inf")}, "drain"),
        ({"vocab": (5, 5)}, "vocab"),
        ({"vocab": (-1, 5)}, "vocab"),
        ({"endpoint": "chat"}, "prompt"),
        ({"slo_ms": {"itl": 5.0}}, "slo"),
        ({"slo_ms": {"ttft": 0.0}}, "slo"),
    ],
)
def test_settings_that_can_not_be_used_name_their_flag(changes: dict[str, Any], param: str) -> None:
    """Every bound is checked before anything is sent."""
    LoadSettings(**GOOD)
    with pytest.raises(ConfigError) as caught:
        LoadSettings(**(GOOD | changes))
    assert caught.value.param == param


def test_slo_text_is_a_map_of_milliseconds() -> None:
    """Parts in any order, blanks allowed, nothing is a valid SLO, too."""
    assert parse_slo("ttft:500, tpot:50.5") == {"ttft": 500.0, "tpot": 50.5}
    assert parse_slo("") == {}
    for text in ("ttft", "ttft:fast", "ttft:1,ttft:2"):
        with pytest.raises(ConfigError):
            parse_slo(text)


def test_vocab_text_is_a_range() -> None:
    """Two numbers with a colon, or an error that shows the form."""
    assert parse_vocab("3:500") == (3, 500)
    with pytest.raises(ConfigError, match="1000:20000"):
        parse_vocab("3-500")


def test_credentials_are_in_no_public_address() -> None:
    """A report may be shown to anybody: user and password are cut out of the target."""
    url = "nats://user:secret@127.0.0.1:4222"
    assert public_url(url) == "nats://127.0.0.1:4222"
    assert user_of(url) == "user"
    assert user_of("nats://127.0.0.1:4222") == "client"
    settings = LoadSettings(**(GOOD | {"target": url, "api_key": "key"}))
    assert settings.public_target == "nats://127.0.0.1:4222"
    assert "key" not in repr(settings).replace("api_key", "")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"ramp_to": 5.0, "rate": None, "concurrency": 1}, "ramp_to"),
        ({"ramp_to": -1.0}, "ramp_to"),
        ({"burstiness": 0.0}, "burstiness"),
        ({"trace": Path("t"), "trace_speed": 0.0}, "trace_speed"),
        ({"trace": Path("t"), "trace_scale": -1.0}, "trace_scale"),
        ({"trace": Path("t"), "max_len": 1}, "max_len"),
        ({"trace": Path("t"), "endpoint": "chat", "prompt": "words"}, "trace"),
        ({"tenant_keys": {"a": "b"}, "target": "nats://127.0.0.1:4222"}, "tenant_key"),
    ],
)
def test_what_can_not_be_sent_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    """Ramps, traces and keys that make no sense are errors of their own option."""
    with pytest.raises(ConfigError) as refused:
        LoadSettings(**(GOOD | changes))
    assert refused.value.param == param


def test_a_trace_needs_no_rate() -> None:
    """Its own times do; a rate or a concurrency replaces them."""
    every: tuple[dict[str, Any], ...] = ({}, {"rate": 2.0}, {"concurrency": 3})
    for changes in every:
        values: dict[str, Any] = {"target": "http://h:1", "model": "m", "trace": Path("t")}
        settings = LoadSettings(**(values | changes))
        assert (settings.arrival_rate is None) == ("rate" not in changes)


@pytest.mark.parametrize("text", ["name", "=key", "name=", "a=1 a=2"])
def test_tenant_keys_are_pairs(text: str) -> None:
    """NAME=KEY, each name once; the key is not in the message."""
    with pytest.raises(ConfigError) as refused:
        parse_tenant_keys(text.split())
    assert refused.value.param == "tenant_key"
    assert text not in refused.value.message
    assert parse_tenant_keys(["a=1", "b=2=3"]) == {"a": "1", "b": "2=3"}
