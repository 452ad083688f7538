"""``mesh prepare``: a model's folder, converted or fetched when it is not there yet."""

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
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file")] = None,
) -> None:
    """Print the folder of a model, on stdout; progress goes to stderr."""
    bus = load(BusConfig, Sources.gather(file=config, flags={"model_cache": model_cache}))
    from workers.engine.sources import resolve_source

    folder = resolve_source(
        source, bus.model_cache, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(folder)
