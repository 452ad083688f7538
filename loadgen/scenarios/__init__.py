"""Fleets and traces that decisions are tried on, as files: what each stands for is its first lines.

    fleets/*.toml   workers, as ``mesh simulate --fleet`` takes them
    traces/*.toml   recipes of requests (``loadgen/recipes.py``), as ``--trace`` takes them

``mesh bench route`` runs them; so can you, and change a copy.
"""

from __future__ import annotations

from pathlib import Path

from schemas.errors import ConfigError

_FOLDER = Path(__file__).parent


def fleet_file(name: str) -> Path:
    """The file of a fleet.

    Raises:
        ConfigError: there is none of that name.
    """
    return _file("fleets", name)


def trace_file(name: str) -> Path:
    """The file of a trace.

    Raises:
        ConfigError: there is none of that name.
    """
    return _file("traces", name)


def names(kind: str) -> tuple[str, ...]:
    """The names of all ``fleets`` or ``traces``, sorted."""
    return tuple(sorted(path.stem for path in (_FOLDER / kind).glob("*.toml")))


def _file(kind: str, name: str) -> Path:
    path = _FOLDER / kind / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(f"no {name!r} among the {kind} {', '.join(names(kind))}", param=kind)
    return path


__all__ = ["fleet_file", "names", "trace_file"]
