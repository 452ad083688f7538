"""``mesh prepare``: what would hold up a worker's first start, done before it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from infra.config import BusConfig
from infra.settings import Sources, load


def prepare(
    source: Annotated[str, typer.Argument(help="built-in name, folder, .gguf file or hub id")],
    model_cache: Annotated[
        str | None, typer.Option(help="where converted models are kept", show_default=False)
    ] = None,
    native_kernels: Annotated[
        bool, typer.Option("--native-kernels", help="compile the engine's native kernels, too")
    ] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file")] = None,
) -> None:
    """Convert or fetch a model where it is not there yet and print its folder, on stdout; progress
    goes to stderr."""
    bus = load(BusConfig, Sources.gather(file=config, flags={"model_cache": model_cache}))
    from workers.engine.sources import resolve_source

    folder = resolve_source(source, bus.model_cache, _say)
    if native_kernels:
        _compile()
    print(folder)


def _compile() -> None:
    """Where it can't be done a worker says so as well, and does without."""
    from workers.engine.native.compiler import NativeUnavailable, compiled_library

    try:
        compiled_library(progress=_say)
    except NativeUnavailable as error:
        _say(f"no native kernels: {error}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
