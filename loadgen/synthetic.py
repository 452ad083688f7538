"""Traces made up by rule, for what published ones don't show apart.

    no-reuse        prompts that share nothing
    shared-prefix   system prompts, some of them much more frequent than others (Zipf)
    chat            conversations: each turn begins with all turns before it
    assistants      conversations that begin with one of some system prompts, all lengths
                    log-normal, and already going on when the trace begins: as public traces look
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

import msgspec

from loadgen.arrivals import Rate, arrivals
from loadgen.traces import HASH_TOKENS, MAX_TRACE_REQUESTS, TraceEntry
from schemas.errors import ConfigError

Kind = Literal["no-reuse", "shared-prefix", "chat", "assistants", "heavy-tail", "tenants"]

_ZIPF = 1.1  # weight of the k-th prompt: 1 / k^1.1
_SYSTEM_SHARE = 0.75  # of a shared-prefix prompt's length
_TOKEN_S = 0.03  # how long an answer is taken to take
_HEAVY = 10  # requests of the one tenant per request of the other
_SETTLED = 3  # after so many mean conversations as many go on as ever will
_MAX_LEN = 1_000_000  # tokens


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
    input_len: int = 2048  # of a prompt; chat, assistants: what a turn adds
    output_len: int = 128
    seed: int = 0
    system_prompts: int = 20  # shared-prefix, assistants: how many there are
    system_len: int = 2048  # assistants: of a system prompt
    turns: float = 5.0  # chat, assistants: of a conversation
    think_s: float = 20.0  # chat, assistants: between an answer's likely end and the next turn
    sigma: float = 1.0  # of long-tailed lengths' logarithm; 1: the longest percent is 10 times mean
    system_sigma: float = 0.5  # assistants: the same of system prompts' lengths

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"no such kind: {self.kind!r}", param="kind")
        for name, most in (
            ("num_requests", MAX_TRACE_REQUESTS),
            ("rate", 1e5),
            ("burstiness", 1e6),
            ("input_len", _MAX_LEN),
            ("output_len", _MAX_LEN),
            ("system_prompts", 10_000),
            ("system_len", _MAX_LEN),
            ("turns", 1000),
            ("think_s", 1e5),
            ("sigma", 3),
            ("system_sigma", 3),
        ):
            if not 0 < getattr(self, name) <= most:
                raise ConfigError(f"{name} is not above 0 and at most {most:g}", param=name)
        if self.turns < 1:
            raise ConfigError("a conversation has 1 turn or more", param="turns")


def synthesize(settings: SyntheticSettings) -> tuple[TraceEntry, ...]:
    """The trace, in the order of time."""
    return tuple(islice(entries_of(settings), settings.num_requests))


def entries_of(settings: SyntheticSettings, first_id: int = 0) -> Iterator[TraceEntry]:
    """The same without end; the ids of its pieces count from ``first_id``."""
    maker = _Maker(settings, first_id)
    makers: dict[Kind, Callable[[], Iterator[TraceEntry]]] = {
        "no-reuse": maker.no_reuse,
        "shared-prefix": maker.shared_prefix,
        "chat": maker.chat,
        "assistants": maker.assistants,
        "heavy-tail": maker.heavy_tail,
        "tenants": maker.tenants,
    }
    return makers[settings.kind]()


@dataclass(frozen=True, slots=True)
class _Talk:
    """What a conversation has said so far: its full pieces, and its length in tokens."""

    pieces: tuple[int, ...] = ()
    length: int = 0


class _Maker:
    def __init__(self, settings: SyntheticSettings, first_id: int) -> None:
        self._settings = settings
        self._rng = random.Random(settings.seed)
        self._fresh = count(first_id)  # hash ids

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
        prompts = [self._ids(num_shared) for _ in range(settings.system_prompts)]
        weights = self._zipf()
        for offset_s in self._offsets_s():
            (system,) = self._rng.choices(prompts, weights)
            length = max(settings.input_len, len(system) * HASH_TOKENS + 1)
            yield self._entry(offset_s, length, settings.output_len, begins=system)

    def chat(self) -> Iterator[TraceEntry]:
        settings = self._settings
        return self._conversations(_Talk, lambda: settings.input_len, lambda: settings.output_len)

    def assistants(self) -> Iterator[TraceEntry]:
        settings = self._settings
        systems = [self._system_prompt() for _ in range(settings.system_prompts)]
        weights = self._zipf()
        settled_s = _SETTLED * settings.turns * self._pause_s(settings.output_len)
        talks = self._conversations(
            lambda: self._rng.choices(systems, weights)[0],
            lambda: self._long_tailed(settings.input_len),
            lambda: self._long_tailed(settings.output_len),
        )
        for entry in talks:
            if (timestamp := entry.timestamp - settled_s * 1e3) >= 0:
                yield msgspec.structs.replace(entry, timestamp=round(timestamp, 3))

    def _conversations(
        self, begin: Callable[[], _Talk], asked: Callable[[], int], answered: Callable[[], int]
    ) -> Iterator[TraceEntry]:
        """They start at a rate that makes as many turns a second as were asked for."""
        settings = self._settings
        starts = self._offsets_s(settings.rate / settings.turns)
        next_start_s = next(starts)
        due: list[tuple[float, int, _Talk]] = []  # time, number, what was said
        for number in count():
            if not due or next_start_s <= due[0][0]:
                heapq.heappush(due, (next_start_s, number, begin()))
                next_start_s = next(starts)
            offset_s, _, talk = heapq.heappop(due)
            length, output_len = talk.length + asked(), answered()
            entry = self._entry(offset_s, length, output_len, begins=talk.pieces)
            yield entry
            is_over = length + output_len >= _MAX_LEN
            if not is_over and self._rng.random() < 1 - 1 / settings.turns:
                whole = entry.hash_ids[: length // HASH_TOKENS]  # the last one was not full
                again_s = offset_s + self._pause_s(output_len, self._rng)
                heapq.heappush(due, (again_s, number, _Talk(whole, length + output_len)))

    def _pause_s(self, output_len: int, rng: random.Random | None = None) -> float:
        """From a turn to the next; its mean without ``rng``."""
        think_s = self._settings.think_s
        return output_len * _TOKEN_S + (rng.expovariate(1 / think_s) if rng else think_s)

    def _system_prompt(self) -> _Talk:
        """Of full pieces, at least one, so that all of it is shared."""
        drawn = self._long_tailed(self._settings.system_len, self._settings.system_sigma)
        num_pieces = max(1, round(drawn / HASH_TOKENS))
        return _Talk(self._ids(num_pieces), num_pieces * HASH_TOKENS)

    def _zipf(self) -> list[float]:
        return [rank**-_ZIPF for rank in range(1, self._settings.system_prompts + 1)]

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

    def _long_tailed(self, mean: int, sigma: float | None = None) -> int:
        sigma = self._settings.sigma if sigma is None else sigma
        drawn = self._rng.lognormvariate(-(sigma**2) / 2, sigma) * mean
        return min(max(1, round(drawn)), _MAX_LEN)
