"""Recipes of traces: a few lines of TOML instead of thousands of JSONL, the same for the same seed.

    duration_s = 120
    seed = 1

    [[part]]                  # each as ``loadgen/synthetic.py`` makes it; they share nothing
    kind = "assistants"
    rate = 40                 # requests per second
    tenant = "large"
    from_s = 30               # it begins then ...
    until_s = 60              # ... and ends

Wherever a trace is read, a file whose name ends in ``.toml`` is read as a recipe.
"""

from __future__ import annotations

import heapq
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import msgspec

from loadgen.synthetic import Kind, SyntheticSettings, entries_of
from loadgen.traces import MAX_TRACE_REQUESTS, TraceEntry
from schemas.errors import ConfigError

_IDS_PER_PART = 1 << 40
_MAX_DURATION_S = 1e6
_SEED_STEP = 1_000_003  # seeds of parts, and of repeats of a recipe, do not meet


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of requests within a recipe; fields as in :class:`SyntheticSettings`."""

    kind: Kind
    rate: float
    tenant: str = ""
    from_s: float = 0.0
    until_s: float = _MAX_DURATION_S
    burstiness: float = 1.0
    input_len: int = 2048
    output_len: int = 128
    system_prompts: int = 20
    system_len: int = 2048
    turns: float = 5.0
    think_s: float = 20.0
    sigma: float = 1.0
    system_sigma: float = 0.5

    def settings(self, seed: int) -> SyntheticSettings:
        """What makes its requests.

        Raises:
            ConfigError: a value that can't be used; ``param`` names it.
        """
        told = msgspec.structs.asdict(self)
        for own in ("tenant", "from_s", "until_s"):
            del told[own]
        return SyntheticSettings(**told, num_requests=MAX_TRACE_REQUESTS, seed=seed)


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trace is made of: the requests of all parts that come within ``duration_s``."""

    duration_s: float
    part: tuple[Part, ...]
    seed: int = 0

    def at_rate(self, factor: float) -> Recipe:
        """The same with ``factor`` times as many requests per second."""
        parts = tuple(msgspec.structs.replace(part, rate=part.rate * factor) for part in self.part)
        return msgspec.structs.replace(self, part=parts)

    @property
    def rate(self) -> float:
        """Requests per second of all parts that begin at the start."""
        return sum(part.rate for part in self.part if part.from_s == 0)


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file.

    Raises:
        ConfigError: it can't be read; or the field that is wrong, with its place.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", param="trace") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", param="trace") from error
    try:
        recipe = msgspec.convert(document, Recipe)
        _check(recipe)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}", param="trace") from error
    return recipe


def make_trace(recipe: Recipe, repeat: int = 0) -> tuple[TraceEntry, ...]:
    """The requests of a recipe, in the order of time; of each ``repeat`` others of the same kind.

    Raises:
        ConfigError: there are none, or too many.
    """
    seed = recipe.seed + repeat * _SEED_STEP * _SEED_STEP
    parts = [
        _entries(part, number, seed, recipe.duration_s) for number, part in enumerate(recipe.part)
    ]
    merged = heapq.merge(*parts, key=lambda entry: entry.timestamp)
    made = []
    for entry in merged:
        made.append(entry)
        if len(made) > MAX_TRACE_REQUESTS:
            raise ConfigError(f"the recipe makes over {MAX_TRACE_REQUESTS} requests", param="trace")
    if not made:
        raise ConfigError("the recipe makes no request", param="trace")
    return tuple(made)


def _entries(part: Part, number: int, seed: int, duration_s: float) -> Iterator[TraceEntry]:
    settings = part.settings(seed + number * _SEED_STEP)
    end_ms = (min(part.until_s, duration_s) - part.from_s) * 1e3
    made = entries_of(settings, first_id=number * _IDS_PER_PART)
    for entry in takewhile(lambda entry: entry.timestamp < end_ms, made):
        yield msgspec.structs.replace(
            entry,
            timestamp=round(entry.timestamp + part.from_s * 1e3, 3),
            tenant=part.tenant or entry.tenant,
        )


def _check(recipe: Recipe) -> None:
    if not 0 < recipe.duration_s <= _MAX_DURATION_S:
        raise ConfigError(f"duration_s is not above 0 and at most {_MAX_DURATION_S:g}")
    if not recipe.part:
        raise ConfigError("there is no [[part]]")
    for part in recipe.part:
        part.settings(0)
        if not 0 <= part.from_s < part.until_s:
            raise ConfigError(f"a part goes from {part.from_s:g} s until {part.until_s:g} s")
