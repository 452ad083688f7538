"""``mesh dead``: look at dead letters, publish them again, throw them away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.commands.operator import Config, Data, Json, Nats, as_control, run, settings_of_mesh
from infra.config import BusConfig
from infra.failure import EXIT_FAILED, report
from schemas.errors import BusUnavailable, InvalidRequest, MeshError

if TYPE_CHECKING:
    from pipeline.dead_letter_box import DeadLetterBox, FiledLetter

Action = Callable[["DeadLetterBox", "FiledLetter"], Awaitable[str]]
Ids = Annotated[list[int] | None, typer.Argument(min=1, metavar="ID...", show_default=False)]
All = Annotated[bool, typer.Option("--all", help="every letter there is now")]
Yes = Annotated[bool, typer.Option("--yes", help="do not ask")]

dead_app = typer.Typer(add_completion=False, no_args_is_help=True)


@dead_app.callback()
def _dead() -> None:
    """Messages that no stage could use (stream MESH_DEAD), named by their number there."""


@dead_app.command("list")
def list_letters(
    json: Json = False, nats: Nats = None, data: Data = None, config: Config = None
) -> None:
    """One line per dead letter, oldest first."""

    async def work() -> int:
        from pipeline.dead_letter_view import summary

        async with as_control(settings_of_mesh(nats, data, config), "dead") as bus:
            found = [summary(one) async for one in _box(bus).letters()]
        _print_json(found) if json else _print_table(found)
        return 0

    run("mesh dead list", work())


@dead_app.command("show")
def show_letter(
    id: Annotated[int, typer.Argument(min=1, metavar="ID")],
    payload: Annotated[
        bool, typer.Option("--payload", help="the whole payload: prompts, secrets of leases")
    ] = False,
    json: Json = False,
    nats: Nats = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Headers, reason and payload of one; what people wrote to a model only with --payload."""

    async def work() -> int:
        from pipeline.dead_letter_view import details

        async with as_control(settings_of_mesh(nats, data, config), "dead") as bus:
            found = details(await _box(bus).get(id), with_payload=payload)
        if json:
            _print_json(found)
        else:
            _print_details(found)
        return 0

    run("mesh dead show", work())


@dead_app.command("retry")
def retry_letters(
    ids: Ids = None,
    all: All = False,
    yes: Yes = False,
    json: Json = False,
    nats: Nats = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Publish again to where they were; the letters go.

    A request that its client was told has ended enters under a new id; any other message is
    refused when its request has ended or gone on.
    """

    async def again(box: DeadLetterBox, filed: FiledLetter) -> str:
        return await box.retry(filed)

    settings = settings_of_mesh(nats, data, config)
    run("mesh dead retry", _each(settings, ids, all, yes, json, "retried", again))


@dead_app.command("drop")
def drop_letters(
    ids: Ids = None,
    all: All = False,
    yes: Yes = False,
    json: Json = False,
    nats: Nats = None,
    data: Data = None,
    config: Config = None,
) -> None:
    """Delete them from the stream."""

    async def drop(box: DeadLetterBox, filed: FiledLetter) -> str:
        await box.drop(filed.seq)
        return filed.request_id

    settings = settings_of_mesh(nats, data, config)
    run("mesh dead drop", _each(settings, ids, all, yes, json, "dropped", drop))


async def _each(
    settings: BusConfig,
    ids: list[int] | None,
    all: bool,
    yes: bool,
    json: bool,
    done: str,
    action: Action,
) -> int:
    """``action`` with each letter; one that is refused does not keep the others."""
    if bool(ids) == all:
        raise InvalidRequest("name letters by their ids, or all with --all", param="id")
    async with as_control(settings, "dead") as bus:
        box = _box(bus)
        chosen = ids or [one.seq async for one in box.letters()]
        if all and not yes and not typer.confirm(f"{len(chosen)} letters: sure?", err=True):
            return EXIT_FAILED
        outcomes, code = [], 0
        for seq in chosen:
            try:
                request_id = await action(box, await box.get(seq))
            except BusUnavailable:
                raise
            except MeshError as error:
                code = report(f"mesh dead: {seq}", error)
                outcomes.append({"id": seq, "outcome": "refused", "reason": error.message})
            else:
                outcomes.append({"id": seq, "outcome": done, "request_id": request_id})
    if json:
        _print_json(outcomes)
    else:
        for one in outcomes:
            if one["outcome"] == done:
                print(f"{one['id']} {done} {one['request_id']}".rstrip())
    return code


def _box(bus: Any) -> DeadLetterBox:
    from pipeline.dead_letter_box import DeadLetterBox

    return DeadLetterBox(bus)


def _print_json(value: Any) -> None:
    import msgspec

    print(msgspec.json.encode(value).decode())


def _print_table(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not found:
        console.print("no dead letters")
        return
    table = Table("id", "when", "stage", "code", "request", "reason", box=None, pad_edge=False)
    for one in found:
        table.add_row(str(one["id"]), _when(one["unix_ms"]), one["stage"], one["code"],
                      one["request_id"], one["reason"])  # fmt: skip
    console.print(table)


def _print_details(found: dict[str, Any]) -> None:
    import msgspec

    for name, value in found.items():
        if name == "unix_ms":
            print(f"when: {_when(value)}")
        elif isinstance(value, dict):
            text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
            print(f"{name}: {text}")
        else:
            print(f"{name}: {value}")


def _when(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000).astimezone().isoformat(" ", "seconds")
