"""The runs of ``mesh bench stream``: medians, how far runs lie apart, and ratios of two servers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadgen.bench.result import Figure
from loadgen.bench.sse_load import LoadFigures


@dataclass(slots=True)
class Samples:
    """The runs of one server with one number of streams."""

    loads: list[LoadFigures] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, Figure]:
        """Medians over the runs."""
        total_us = [
            sum(cpu_s.values()) / tokens * 1e6
            for cpu_s, tokens in zip(self.cpu_s, self.num_tokens, strict=True)
        ]
        rates = [t / load.wall_s for t, load in zip(self.num_tokens, self.loads, strict=True)]
        return {
            "chunks_s": round(statistics.median(rates), 1),
            "ttft_ms": self._median_of("ttft_ms"),
            "gap_ms": self._median_of("gap_ms"),
            "cpu_us_per_chunk": self._cpu_us() | {"total": round(statistics.median(total_us), 2)},
            "spread": {
                "chunks_s": _relative_spread(rates),
                "cpu_us_per_chunk": _relative_spread(total_us),
                "ttft_p50": _relative_spread([load.ttft_ms["p50"] for load in self.loads]),
            },
            "client": {
                "cpu_us_per_chunk": round(self._median_client_us(), 2),
                "cores": round(statistics.median(one.cpu_s / one.wall_s for one in self.loads), 2),
            },
        }

    def _median_of(self, name: str) -> dict[str, float]:
        spreads: list[dict[str, float]] = [getattr(load, name) for load in self.loads]
        return {
            key: round(statistics.median(spread[key] for spread in spreads), 3)
            for key in ("p50", "p99")
        }

    def _cpu_us(self) -> dict[str, float]:
        pairs = list(zip(self.cpu_s, self.num_tokens, strict=True))
        return {
            kind: round(statistics.median(cpu_s[kind] / n * 1e6 for cpu_s, n in pairs), 2)
            for kind in sorted(self.cpu_s[0])
        }

    def _median_client_us(self) -> float:
        pairs = zip(self.loads, self.num_tokens, strict=True)
        return statistics.median(load.cpu_s / n * 1e6 for load, n in pairs)


def ratios(mesh: Samples, peer: Samples) -> dict[str, float]:
    """Mesh divided by peer: medians over the pairs of runs that followed each other."""
    pairs = list(zip(_facts(mesh), _facts(peer), strict=True))
    return {
        name: round(statistics.median(ours[name] / theirs[name] for ours, theirs in pairs), 3)
        for name in ("cpu_us_per_chunk", "chunks_s", "ttft_p50")
    }


def _facts(samples: Samples) -> list[dict[str, float]]:
    runs = zip(samples.loads, samples.cpu_s, samples.num_tokens, strict=True)
    return [
        {
            "cpu_us_per_chunk": sum(cpu_s.values()) / tokens,
            "chunks_s": tokens / load.wall_s,
            "ttft_p50": load.ttft_ms["p50"],
        }
        for load, cpu_s, tokens in runs
    ]


def _relative_spread(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    return round((max(values) - min(values)) / middle, 3) if middle else 0.0
