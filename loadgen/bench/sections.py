"""Benches of several sections: which of them run, and one after the other."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from schemas.errors import ConfigError


def chosen(
    only: str, sections: Mapping[str, str], unasked: Collection[str] = ()
) -> tuple[str, ...]:
    """The sections that ``only`` names with commas between them, in their usual order; when it is
    empty, all that are not ``unasked``.

    Raises:
        ConfigError: there is no such section.
    """
    wanted = {name.strip() for name in only.split(",")} - {""}
    unknown = wanted - sections.keys()
    if unknown:
        raise ConfigError(
            f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}",
            param="only",
        )
    wanted = wanted or sections.keys() - set(unasked)
    return tuple(name for name in sections if name in wanted)


def measured(
    names: Sequence[str], sections: Mapping[str, str], plan: object, tell: Callable[[str], None]
) -> tuple[Any, ...]:
    """What ``measure(plan)`` of each section's module gives; ``tell`` hears which one begins.

    Raises:
        MeshError: a section could not be measured.
    """
    found = []
    for name in names:
        tell(name)
        found.append(importlib.import_module(sections[name]).measure(plan))
    return tuple(found)


def tell_begun(name: str) -> None:
    """Say on stderr what is measured now."""
    print(f"measuring {name} …", file=sys.stderr)
