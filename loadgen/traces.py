"""Traces of requests: one JSON object per line, in the form that Mooncake published.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``timestamp`` counts milliseconds from the start. Each of ``hash_ids`` stands for 512 tokens of the
prompt, in order: two requests that begin with the same ids begin with the same tokens. ``tenant``
may name who asks; fields that are not known are left alone.

Source: Qin et al., Mooncake (FAST'25), and the traces beside its code.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from loadgen.workload import LoadRequest
from schemas.errors import ConfigError

HASH_TOKENS = 512  # that one of hash_ids stands for
MAX_TRACE_REQUESTS = 1_000_000
_KEPT_PIECES = 4096  # of prompts: 2,048 tokens each at most, made again when needed


class TraceEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace; lengths are tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    tenant: str = ""


def read_trace(path: Path) -> tuple[TraceEntry, ...]:
    """The entries of a file, in the order of their time; of a recipe (``.toml``) those it makes.

    Raises:
        ConfigError: it can't be read, is empty or too long; or the line and field that is wrong.
    """
    if path.suffix == ".toml":
        from loadgen.recipes import make_trace, read_recipe  # which make entries: a circle

        return make_trace(read_recipe(path))
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", param="trace") from error
    decoder = msgspec.json.Decoder(TraceEntry)
    entries = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="trace") from error
        if (wrong := _fault(entry)) is not None:
            raise ConfigError(f"{path}, line {number}: {wrong}", param="trace")
        entries.append(entry)
    if not 0 < len(entries) <= MAX_TRACE_REQUESTS:
        raise ConfigError(f"{path} has {len(entries)} requests", param="trace")
    return tuple(sorted(entries, key=lambda entry: entry.timestamp))


def write_trace(entries: Iterable[TraceEntry], path: Path) -> int:
    """Write entries to ``path``, one line each; returns how many.

    Raises:
        ConfigError: the file can't be written.
    """
    lines = [msgspec.json.encode(entry) + b"\n" for entry in entries]
    try:
        path.write_bytes(b"".join(lines))
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", param="out") from error
    return len(lines)


def _fault(entry: TraceEntry) -> str | None:
    if not 0 <= entry.timestamp < float("inf"):
        return f"timestamp is {entry.timestamp}"
    for name in ("input_length", "output_length"):
        if (value := getattr(entry, name)) < 1:
            return f"{name} is {value}, it must be at least 1"
    if any(not 0 <= hash_id < 2**63 for hash_id in entry.hash_ids):
        return "hash_ids must be numbers from 0 on"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """The prompts of a trace, as token ids.

    Args:
        scale: lengths are multiplied by this, those of the shared pieces as well: a trace of long
            prompts for a model of a short context.
        max_tokens: what prompt and answer together may be long; longer ones are cut, the prompt
            first.
    """

    entries: tuple[TraceEntry, ...]
    model: str
    seed: int = 0
    scale: float = 1.0
    max_tokens: int = 2**31
    vocab_low: int = 1000
    vocab_high: int = 20000

    def offsets_s(self, speed: float) -> Iterator[float]:
        """When each is due, ``speed`` times as fast as it was."""
        first = self.entries[0].timestamp
        return ((entry.timestamp - first) / 1e3 / speed for entry in self.entries)

    def requests(self) -> Iterator[LoadRequest]:
        """One for each entry, in order."""
        pieces = lru_cache(maxsize=_KEPT_PIECES)(self._piece)
        for number, entry in enumerate(self.entries):
            input_len, output_len = self._lengths(entry)
            ids: list[int] = []
            for hash_id in entry.hash_ids:
                if len(ids) >= input_len:
                    break
                ids += pieces(hash_id)
            if len(ids) < input_len:
                ids += self._random([self.seed, 1, number], input_len - len(ids))
            yield self._request(number, ids[:input_len], output_len, entry.tenant)

    def warmup(self, num_requests: int) -> Iterator[LoadRequest]:
        """``num_requests`` requests of the trace's first shapes, whose prompts no entry has."""
        for number in range(1, num_requests + 1):
            entry = self.entries[(number - 1) % len(self.entries)]
            input_len, output_len = self._lengths(entry)
            ids = self._random([self.seed, 2, number], input_len)
            yield self._request(-number, ids, output_len, entry.tenant)

    def _lengths(self, entry: TraceEntry) -> tuple[int, int]:
        output_len = max(1, round(entry.output_length * self.scale))
        output_len = min(output_len, self.max_tokens - 1)
        input_len = max(1, round(entry.input_length * self.scale))
        return min(input_len, self.max_tokens - output_len), output_len

    def _piece(self, hash_id: int) -> Sequence[int]:
        length = max(1, round(HASH_TOKENS * self.scale))
        return self._random([self.seed, 0, hash_id], length)

    def _random(self, key: Sequence[int], length: int) -> list[int]:
        rng = np.random.default_rng(list(key))
        ids: list[int] = rng.integers(self.vocab_low, self.vocab_high, length).tolist()
        return ids

    def _request(
        self, number: int, ids: Sequence[int], output_len: int, tenant: str
    ) -> LoadRequest:
        return LoadRequest(
            number=number,
            request_id=secrets.token_hex(16),
            model=self.model,
            prompt=tuple(ids),
            input_len=len(ids),
            output_len=output_len,
            seed=(self.seed + abs(number)) % 2**31,
            tenant=tenant,
        )
