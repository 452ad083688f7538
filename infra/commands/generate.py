"""``mesh generate``: one request, published to the bus; its text streams to stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.commands.operator import CONNECT_S
from infra.config import BusConfig
from infra.failure import EXIT_INTERRUPTED, first_mesh_error, report
from infra.settings import Sources, load
from schemas.errors import InvalidRequest, MeshError

if TYPE_CHECKING:
    from pipeline.client import MeshClient
    from schemas.requests import InferenceRequest
    from schemas.tokens import StreamEnd


def generate(
    prompt: Annotated[str, typer.Argument(help="what the user says; - reads stdin")],
    model: Annotated[
        str | None, typer.Option(help="default: the only model there is", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens at most")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="of sampling", show_default=False)] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="deadline in seconds")] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="one JSON object when done")] = False,
    nats: Annotated[
        str | None, typer.Option(help="broker URL; default: DATA/bus.env", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="data directory of the mesh", show_default=False)
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file")] = None,
) -> None:
    """Ask a model over the bus; by default the mesh that runs in the data directory.

    Ctrl-C cancels the request.
    """
    settings = load(BusConfig, Sources.gather(file=config, flags={"nats_url": nats, "data": data}))
    text = sys.stdin.read() if prompt == "-" else prompt

    def make(chosen: str, deadline_unix_ms: int) -> InferenceRequest:
        from pipeline.client import new_request_id
        from schemas.requests import ChatMessage, InferenceRequest, SamplingParams

        said = [ChatMessage(role="system", content=system)] if system else []
        return InferenceRequest(
            request_id=new_request_id(),
            model=chosen,
            messages=(*said, ChatMessage(role="user", content=text)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
            deadline_unix_ms=deadline_unix_ms,
        )

    try:
        asyncio.run(_generate(settings, model, timeout, json, make))
    except KeyboardInterrupt as error:
        raise typer.Exit(EXIT_INTERRUPTED) from error
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        raise typer.Exit(report("mesh generate", ours)) from error


async def _generate(
    settings: BusConfig,
    model: str | None,
    timeout_s: float,
    json: bool,
    make: Callable[[str, int], InferenceRequest],
) -> None:
    from infra.times import Times
    from pipeline.client import MeshClient

    times = Times(connect_timeout_s=CONNECT_S).scaled(settings.time_scale)
    async with MeshClient.connect(settings.url("client"), times=times) as mesh:
        chosen = model or await _only_model(mesh)
        request = make(chosen, mesh.bus.now_unix_ms() + int(timeout_s * 1000))
        pieces = []
        async with await mesh.submit(request) as stream:
            async for delta in stream:
                pieces.append(delta.text)
                if not json:
                    print(delta.text, end="", flush=True)
        assert stream.end is not None, "iterated to the end"
    print(_summary(request, "".join(pieces), stream.end) if json else "")


async def _only_model(mesh: MeshClient) -> str:
    from pipeline.registry import Registry

    registry = Registry(mesh.bus)
    await registry.refresh()
    names = [card.name for card in registry.cards()]
    if len(names) != 1:
        raise InvalidRequest(
            f"give --model, one of: {', '.join(names)}" if names else "the mesh has no model yet",
            param="model",
        )
    return names[0]


def _summary(request: InferenceRequest, text: str, end: StreamEnd) -> str:
    import msgspec

    return msgspec.json.encode(
        {
            "request_id": request.request_id,
            "model": request.model,
            "text": text,
            "finish_reason": end.finish_reasons[0],
            "usage": end.usage,
        }
    ).decode()
