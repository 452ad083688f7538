"""Command-line options out of configuration classes: declared once, spelled the same everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from infra.config import BusConfig, UpConfig, load_up
from infra.settings import Configured, Setting, Sources, load, settings_of, variable

C = TypeVar("C", bound=Configured)
Command = Callable[..., None]


def takes(
    kind: type[C], also: Mapping[type[Configured], tuple[str, ...]] | None = None
) -> Callable[[Callable[[C], None]], Command]:
    """Make ``function(config)`` a typer command with an option per setting of ``kind`` and of
    ``BusConfig``.

    Args:
        also: settings of nested configurations that get an option, too.
    """

    def decorate(function: Callable[[C], None]) -> Command:
        def command(config: Path | None = None, **flags: object) -> None:
            function(_build(kind, config, flags))

        parameters = [_config_parameter(), *_parameters(kind, also or {})]
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _build(kind: type[C], file: Path | None, flags: Mapping[str, object]) -> Any:
    if issubclass(kind, UpConfig):
        return load_up(file=file, flags=flags)
    return load(kind, Sources.gather(file=file, flags=flags))


def _config_parameter() -> inspect.Parameter:
    option = typer.Option("--config", metavar="FILE", help="TOML file, one table per role")
    return _parameter("config", Annotated[Path | None, option])


def _parameters(
    kind: type[Configured], also: Mapping[type[Configured], tuple[str, ...]]
) -> Iterator[inspect.Parameter]:
    for one, found in settings_of(kind):
        yield _of_setting(kind.table, one.name, found)
    for nested, names in also.items():
        for one, found in settings_of(nested):
            if one.name in names:
                yield _of_setting(nested.table, one.name, found)
    for one, found in settings_of(BusConfig):
        yield _of_setting(BusConfig.table, one.name, found)


def _of_setting(table: str, name: str, found: Setting) -> inspect.Parameter:
    option = typer.Option(
        found.flag,
        help=f"{found.help}  [{variable(table, name)}]",
        metavar="NAME=SOURCE" if found.flag == "--model" else "VALUE",
        show_default=False,
    )
    annotation: Any = list[str] | None if found.many else str | None
    return _parameter(name, Annotated[annotation, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
