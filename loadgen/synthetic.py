"""Traces made up by rule, for what published ones don't show apart.

    no-reuse        prompts that share nothing
    shared-prefix   system prompts, some of them much more frequent than others (Zipf)
    chat            conversations: each turn begins with all turns before it
    heavy-tail      lengths of which few are most of the work (log-normal)
    tenants         two tenants, one of which sends ten times as much

The same settings and seed give the same trace.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, get_args

from loadgen.arrivals import Rate, arrivals
from loadgen.traces import HASH_TOKENS, MAX_TRACE_REQUESTS, TraceEntry
from schemas.errors import ConfigError

Kind = Literal["no-reuse", "shared-prefix", "chat", "heavy-tail", "tenants"]

_SYSTEM_PROMPTS = 20
_ZIPF = 1.1  # weight of the k-th prompt: 1 / k^1.1
_SYSTEM_SHARE = 0.75  # of a shared-prefix prompt's length
_MEAN_TURNS = 5
_THINK_S = 20.0  # mean, between an answer's likely end and the next turn
_TOKEN_S = 0.03  # how long an answer is taken to take
_SIGMA = 1.0  # of the logarithm of a heavy tail's lengths: the longest percent is 10 times the mean
_HEAVY = 10  # requests of the one tenant per request of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSettings:
    """What to make; lengths are means, in tokens.

    Raises:
        ConfigError: a value that can't be used; ``param`` names it.
    """

    kind: Kind
    num_requests: int
    rate: float  # requests per second
    burstiness: float = 1.0
    input_len: int = 2048
    output_len: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"no such kind: {self.kind!r}", param="kind")
        for name, most in (
            ("num_requests", MAX_TRACE_REQUESTS),
            ("rate", 1e5),
            ("burstiness", 1e6),
            ("input_len", 1_000_000),
            ("output_len", 1_000_000),
        ):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} is not above 0 and at most {most:g}", param=name)


def synthesize(settings: SyntheticSettings) -> tuple[TraceEntry, ...]:
    """The trace, in the order of time."""
    maker = _Maker(settings)
    makers: dict[Kind, Callable[[], Iterator[TraceEntry]]] = {
        "no-reuse": maker.no_reuse,
        "shared-prefix": maker.shared_prefix,
        "chat": maker.chat,
        "heavy-tail": maker.heavy_tail,
        "tenants": maker.tenants,
    }
    return tuple(islice(makers[settings.kind](), settings.num_requests))


class _Maker:
    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._fresh = count()  # hash ids

    def _offsets_s(self, rate: float | None = None) -> Iterator[float]:
        settings = self._settings
        every = Rate.constant(settings.rate if rate is None else rate)
        return arrivals(every, settings.burstiness, self._rng)

    def no_reuse(self) -> Iterator[TraceEntry]:
        settings = self._settings
        for offset_s in self._offsets_s():
            yield self._entry(offset_s, settings.input_len, settings.output_len)

    def heavy_tail(self) -> Iterator[TraceEntry]:
        settings = self._settings
        for offset_s in self._offsets_s():
            yield self._entry(
                offset_s,
                self._long_tailed(settings.input_len),
                self._long_tailed(settings.output_len),
            )

    def tenants(self) -> Iterator[TraceEntry]:
        settings = self._settings
        for offset_s in self._offsets_s():
            tenant = "small" if self._rng.randrange(_HEAVY + 1) == 0 else "large"
            yield self._entry(offset_s, settings.input_len, settings.output_len, tenant=tenant)

    def shared_prefix(self) -> Iterator[TraceEntry]:
        settings = self._settings
        num_shared = round(settings.input_len * _SYSTEM_SHARE / HASH_TOKENS)
        prompts = [self._ids(num_shared) for _ in range(_SYSTEM_PROMPTS)]
        weights = [rank**-_ZIPF for rank in range(1, _SYSTEM_PROMPTS + 1)]
        for offset_s in self._offsets_s():
            (system,) = self._rng.choices(prompts, weights)
            length = max(settings.input_len, len(system) * HASH_TOKENS + 1)
            yield self._entry(offset_s, length, settings.output_len, begins=system)

    def chat(self) -> Iterator[TraceEntry]:
        """Conversations start at a rate that makes as many turns a second as were asked for."""
        settings = self._settings
        starts = self._offsets_s(settings.rate / _MEAN_TURNS)
        next_start_s = next(starts)
        due: list[tuple[float, int, tuple[int, ...], int]] = []  # time, number, prompt, its length
        for number in count():
            if not due or next_start_s <= due[0][0]:
                heapq.heappush(due, (next_start_s, number, (), 0))
                next_start_s = next(starts)
            offset_s, _, begins, length = heapq.heappop(due)
            length += settings.input_len
            entry = self._entry(offset_s, length, settings.output_len, begins=begins)
            yield entry
            if self._rng.random() < 1 - 1 / _MEAN_TURNS:
                think_s = self._rng.expovariate(1 / _THINK_S)
                again_s = offset_s + settings.output_len * _TOKEN_S + think_s
                whole = entry.hash_ids[: length // HASH_TOKENS]  # the last one was not full
                heapq.heappush(due, (again_s, number, whole, length + settings.output_len))

    def _entry(
        self,
        offset_s: float,
        input_len: int,
        output_len: int,
        *,
        begins: tuple[int, ...] = (),
        tenant: str = "",
    ) -> TraceEntry:
        missing = -(-input_len // HASH_TOKENS) - len(begins)
        return TraceEntry(
            timestamp=round(offset_s * 1e3, 3),
            input_length=input_len,
            output_length=output_len,
            hash_ids=begins + self._ids(missing),
            tenant=tenant,
        )

    def _ids(self, number: int) -> tuple[int, ...]:
        return tuple(islice(self._fresh, max(0, number)))

    def _long_tailed(self, mean: int) -> int:
        drawn = self._rng.lognormvariate(-(_SIGMA**2) / 2, _SIGMA) * mean
        return min(max(1, round(drawn)), 1_000_000)
