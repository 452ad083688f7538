"""What one load run is told: checked once, then only read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from loadgen.arrivals import Rate
from loadgen.traces import TraceWorkload, read_trace
from loadgen.workload import PromptKind, Workload
from schemas.errors import ConfigError

MAX_DURATION_S = 3600.0
MAX_REQUESTS = 1_000_000
MAX_IN_FLIGHT = 8192
MAX_LEN = 1_000_000  # tokens of a prompt or an answer

SLO_KEYS = ("ttft", "tpot", "tbt", "e2e")

Endpoint = Literal["completions", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """A load run, in an open loop at ``rate`` or in a closed one at ``concurrency``.

    A ``trace`` gives the requests, and unless one of the two is set, also their times. Without one
    exactly one of the two is set.

    Raises:
        ConfigError: a value that can't be used; ``param`` is the name of the field.
    """

    target: str
    model: str
    rate: float | None = None  # requests per second
    ramp_to: float | None = None  # the rate goes there evenly while requests are sent
    burstiness: float = 1.0  # of arrivals at a rate: 1 is Poisson, less comes in bursts
    concurrency: int | None = None  # requests at a time
    trace: Path | None = None
    trace_speed: float = 1.0  # the trace's times are divided by this
    trace_scale: float = 1.0  # and its lengths multiplied by this
    max_len: int = MAX_LEN  # of prompt and answer of a trace's request; cut to it
    duration_s: float = MAX_DURATION_S  # of sending; what is in flight then is still awaited
    num_requests: int = MAX_REQUESTS
    input_len: int = 128
    output_len: int = 64
    prompt: PromptKind = "ids"
    endpoint: Endpoint = "completions"  # on the bus: a prompt, or messages
    vocab: tuple[int, int] = (1000, 20000)  # half-open range of prompt token ids
    seed: int = 0
    warmup: int = 1
    timeout_s: float = 120.0  # of one request
    drain_s: float = 30.0  # how long requests in flight are awaited after the last was sent
    max_in_flight: int = 1024
    slo_ms: dict[str, float] = field(default_factory=dict)  # keys of SLO_KEYS
    api_key: str = field(default="", repr=False)
    tenant_keys: dict[str, str] = field(default_factory=dict, repr=False)  # of a trace's tenants

    def __post_init__(self) -> None:
        self._check_mode()
        self._check_trace()
        _check_target(self.target)
        _check_range("duration", self.duration_s, 0, MAX_DURATION_S)
        _check_range("requests", self.num_requests, 0, MAX_REQUESTS)
        _check_range("input_len", self.input_len, 0, MAX_LEN)
        _check_range("output_len", self.output_len, 0, MAX_LEN)
        _check_range("timeout", self.timeout_s, 0, MAX_DURATION_S)
        _check_range("drain", self.drain_s, 0, MAX_DURATION_S)
        _check_range("max_in_flight", self.max_in_flight, 0, MAX_IN_FLIGHT)
        _check_range("warmup", self.warmup, -1, MAX_REQUESTS)
        _check_range("seed", self.seed, -1, 2**31 - 1)
        self._check_prompt()
        for key, value in self.slo_ms.items():
            if key not in SLO_KEYS:
                raise ConfigError(f"no such SLO: {key!r} (of {', '.join(SLO_KEYS)})", param="slo")
            _check_range("slo", value, 0, math.inf)

    def _check_mode(self) -> None:
        num_modes = (self.rate is not None) + (self.concurrency is not None)
        if num_modes != 1 and (num_modes or self.trace is None):
            raise ConfigError("give either a rate or a concurrency", param="rate")
        if self.rate is not None:
            _check_range("rate", self.rate, 0, 100_000)
        if self.concurrency is not None:
            _check_range("concurrency", self.concurrency, 0, MAX_IN_FLIGHT)
        _check_range("burstiness", self.burstiness, 0, math.inf)
        if self.ramp_to is not None:
            if self.rate is None:
                raise ConfigError("a ramp begins at a rate", param="ramp_to")
            _check_range("ramp_to", self.ramp_to, 0, 100_000)

    def _check_trace(self) -> None:
        _check_range("trace_speed", self.trace_speed, 0, 1e6)
        _check_range("trace_scale", self.trace_scale, 0, 1e3)
        _check_range("max_len", self.max_len, 1, MAX_LEN)
        if self.trace is not None and self.endpoint == "chat":
            raise ConfigError("chat does not take the token ids of a trace", param="trace")
        if self.tenant_keys and not self.target.startswith("http"):
            raise ConfigError("API keys are for HTTP targets", param="tenant_key")

    def _check_prompt(self) -> None:
        low, high = self.vocab
        if not 0 <= low < high <= 2**32:
            raise ConfigError(f"{low}:{high} is no range of token ids", param="vocab")
        if self.endpoint == "chat" and self.prompt == "ids":
            raise ConfigError("chat takes words, not token ids", param="prompt")

    @property
    def arrival_rate(self) -> Rate | None:
        """Of an open loop that has a rate of its own."""
        if self.rate is None:
            return None
        end = self.rate if self.ramp_to is None else self.ramp_to
        return Rate(start=self.rate, end=end, over_s=self.duration_s)

    def workload(self) -> Workload | TraceWorkload:
        """The requests that these settings describe.

        Raises:
            ConfigError: the trace can't be read.
        """
        if self.trace is not None:
            return TraceWorkload(
                entries=read_trace(self.trace)[: self.num_requests],
                model=self.model,
                seed=self.seed,
                scale=self.trace_scale,
                max_tokens=self.max_len,
                vocab_low=self.vocab[0],
                vocab_high=self.vocab[1],
            )
        return Workload(
            model=self.model,
            input_len=self.input_len,
            output_len=self.output_len,
            seed=self.seed,
            kind=self.prompt,
            vocab_low=self.vocab[0],
            vocab_high=self.vocab[1],
            is_chat=self.endpoint == "chat",
        )

    @property
    def public_target(self) -> str:
        """The target without user and password."""
        return public_url(self.target)


def user_of(nats_url: str) -> str:
    """The broker user in ``nats_url``; a url without one is a client's."""
    return urlsplit(nats_url).username or "client"


def public_url(url: str) -> str:
    """``url`` without user and password: fit for a report."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def parse_slo(text: str) -> dict[str, float]:
    """``ttft:500,tpot:50`` as a map of milliseconds; empty text is an empty map.

    Raises:
        ConfigError: a part without a number, or twice the same key.
    """
    slo: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            raise ConfigError(f"{part!r} is not of the form ttft:500", param="slo") from None
        if key in slo:
            raise ConfigError(f"{key} stands there twice", param="slo")
        slo[key] = limit_ms
    return slo


def parse_tenant_keys(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=KEY`` each, as a map.

    Raises:
        ConfigError: no such pair, or a name twice. The key is not shown.
    """
    keys: dict[str, str] = {}
    for pair in pairs:
        name, _, key = pair.partition("=")
        if not name or not key:
            raise ConfigError("it is of the form NAME=KEY", param="tenant_key")
        if name in keys:
            raise ConfigError(f"{name} stands there twice", param="tenant_key")
        keys[name] = key
    return keys


def parse_vocab(text: str) -> tuple[int, int]:
    """``1000:20000`` as a half-open range of token ids.

    Raises:
        ConfigError: not two numbers.
    """
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form 1000:20000", param="vocab") from None


def _check_target(target: str) -> None:
    try:
        parts = urlsplit(target)
        valid = parts.scheme in ("http", "https", "nats", "tls") and bool(parts.hostname)
        valid = valid and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{target!r} is no http://, https:// or nats:// address", param="target")


def _check_range(name: str, value: float, above: float, most: float) -> None:
    if not above < value <= most:
        limit = "" if math.isinf(most) else f" and at most {most:g}"
        raise ConfigError(f"{name} is {value:g}, it must be above {above:g}{limit}", param=name)
