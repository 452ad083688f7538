"""A trace's requests at another rate than its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.recipes import make_trace, read_recipe
from loadgen.traces import TraceEntry, read_trace
from schemas.errors import ConfigError


def read_trace_at(path: Path, rate: float | None) -> tuple[TraceEntry, ...]:
    """The entries of a file, at ``rate`` requests per second: a recipe makes more of them in the
    same time, any other trace is run faster. None: as it is.

    Raises:
        ConfigError: the trace can't be read, or the rate is none.
    """
    if rate is None:
        return read_trace(path)
    if not 0 < rate < 1e6:
        raise ConfigError(f"rate is {rate:g}, it must be above 0", param="rate")
    if path.suffix == ".toml":
        recipe = read_recipe(path)
        return make_trace(recipe.at_rate(rate / recipe.rate))
    entries = read_trace(path)
    first, last = entries[0].timestamp, entries[-1].timestamp
    if last == first:
        raise ConfigError("all requests come at one moment: they have no rate", param="rate")
    own = 1e3 * (len(entries) - 1) / (last - first)
    return tuple(
        msgspec.structs.replace(entry, timestamp=first + (entry.timestamp - first) * own / rate)
        for entry in entries
    )
