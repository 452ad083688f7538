"""Parsers for settings: text or a TOML value in, a checked value out, ValueError with a reason."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\Z")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")
_DEVICE = re.compile(r"(auto|cpu|cuda(:\d{1,3})?)\Z")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@,]+\Z")

_CGROUP_LIMITS = (  # of the second and the first version of control groups
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as clients name it, and where it comes from: a built-in name, a folder, a file or
    a hub id."""

    name: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}={self.source}"


def whole(low: int, high: int) -> Callable[[object], int]:
    """A whole number from ``low`` to ``high``."""

    def parse(raw: object) -> int:
        try:
            if isinstance(raw, bool | float):
                raise ValueError
            value = int(str(raw))
        except ValueError:
            raise ValueError(f"{raw!r} is no whole number") from None
        if not low <= value <= high:
            raise ValueError(f"{value} is not from {low} to {high}")
        return value

    return parse


def number(low: float, high: float) -> Callable[[object], float]:
    """A number from ``low`` to ``high``."""

    def parse(raw: object) -> float:
        try:
            if isinstance(raw, bool):
                raise ValueError
            value = float(str(raw))
        except ValueError:
            raise ValueError(f"{raw!r} is no number") from None
        if not low <= value <= high:  # also false for nan
            raise ValueError(f"{value:g} is not from {low:g} to {high:g}")
        return value

    return parse


def choice(*names: str) -> Callable[[object], str]:
    """One of ``names``."""

    def parse(raw: object) -> str:
        if raw not in names:
            raise ValueError(f"{raw!r} is none of {', '.join(names)}")
        return str(raw)

    return parse


def device(raw: object) -> str:
    """What an engine computes on: auto, cpu, cuda or cuda:N."""
    if not isinstance(raw, str) or not _DEVICE.match(raw):
        raise ValueError(f"{raw!r} is none of auto, cpu, cuda, cuda:0, cuda:1, …")
    return raw


def text(raw: object) -> str:
    """Any text that is not empty."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"{raw!r} is no text")
    return raw.strip()


def any_text(raw: object) -> str:
    """Any text; empty: there is none."""
    return "" if raw == "" else text(raw)


def process_name(raw: object) -> str:
    """A name that can stand in a subject and in a file name."""
    if not isinstance(raw, str) or not _NAME.match(raw):
        raise ValueError(f"{raw!r} is not 1 to 40 of the characters A-Z a-z 0-9 _ -")
    return raw


def path(raw: object) -> Path:
    """An absolute path; ``~`` is the home directory."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"{raw!r} is no path")
    try:
        return Path(raw).expanduser().absolute()
    except RuntimeError as error:  # ~somebody, whom this machine does not know
        raise ValueError(f"{raw!r}: {error}") from error


def profile_name(raw: object) -> str:
    """The name of a worker profile, or the absolute path of its file: what has a slash, or ends in
    ``.toml``."""
    name = text(raw)
    return str(path(name)) if "/" in name or name.endswith(".toml") else name


def size_bytes(low: int) -> Callable[[object], int]:
    """Bytes, at least ``low``: a number, or text such as ``2GB`` (10^9) or ``512MiB`` (2^20)."""

    def parse(raw: object) -> int:
        found = None if isinstance(raw, bool) else _SIZE.match(str(raw).strip())
        unit = _UNITS.get(found["unit"].lower()) if found else None
        if found is None or unit is None:
            raise ValueError(f"{raw!r} is no size like 2GB or 512MiB")
        value = int(float(found["number"]) * unit)
        if value < low:
            raise ValueError(f"{value} bytes are less than {low}")
        return value

    return parse


def memory_bytes(low: int) -> Callable[[object], int]:
    """As :func:`size_bytes`, or a share of what memory this process may use, such as ``25%``."""
    in_bytes = size_bytes(low)

    def parse(raw: object) -> int:
        if not isinstance(raw, str) or not raw.strip().endswith("%"):
            return in_bytes(raw)
        try:
            share = float(raw.strip().removesuffix("%"))
        except ValueError:
            share = math.nan
        if not 0 <= share <= 100:
            raise ValueError(f"{raw!r} is no share from 0% to 100%")
        return in_bytes(int(memory_limit_bytes() * share / 100))

    return parse


def memory_limit_bytes() -> int:
    """What this process may use: the machine's memory, or less where its control group has a
    limit."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
            limit = min(limit, int(Path(path).read_text()))
    return limit


def model(raw: object) -> ModelSource:
    """``NAME=SOURCE``, or a source that is its own name."""
    name, equals, source = text(raw).partition("=")
    if not name or (equals and not source):
        raise ValueError(f"{raw!r} is not NAME=SOURCE")
    return ModelSource(name, source or name)


def models(raw: object) -> tuple[ModelSource, ...]:
    """Several models: text with commas, a list of ``NAME=SOURCE``, or a table of both."""
    if isinstance(raw, Mapping):
        raw = [f"{name}={source}" for name, source in raw.items()]
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not items:
        raise ValueError(f"{raw!r} is no list of NAME=SOURCE")
    parsed = tuple(item if isinstance(item, ModelSource) else model(item) for item in items)
    names = [item.name for item in parsed]
    if len(set(names)) < len(names):
        raise ValueError(f"a model is named twice: {', '.join(names)}")
    return parsed


def origins(raw: object) -> tuple[str, ...]:
    """Origins as browsers send them, ``scheme://host[:port]`` in small letters, or ``*``: text with
    commas, or a list."""
    items = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple):
        raise ValueError(f"{raw!r} is no list of origins")
    parsed = tuple(text(item).lower() for item in items)
    for item in parsed:
        if item != "*" and not _ORIGIN.match(item):
            raise ValueError(f"{item!r} is no origin like https://chat.example.com, and not *")
    return tuple(dict.fromkeys(parsed))
