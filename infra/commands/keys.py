"""``mesh keys``: make API keys, list them, revoke them. The bridge reads the file by itself."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.commands.operator import Json
from infra.parse import process_name
from schemas.errors import InvalidRequest

if TYPE_CHECKING:
    from infra.config import BridgeConfig
    from pipeline.access.key import ApiKey

File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]

keys_app = typer.Typer(add_completion=False, no_args_is_help=True)


@keys_app.callback()
def _keys() -> None:
    """API keys of the bridge, in a TOML file (mesh bridge --api-keys FILE)."""


@keys_app.command("new")
def new(
    tenant: Annotated[
        str, typer.Option(help="whose key it is; keys of one tenant share cached prompts")
    ],
    name: Annotated[
        str | None, typer.Option(help="for log lines; default: made of the tenant")
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(help="models it may use, with commas; a* for all that begin so; default: all"),
    ] = None,
    rpm: Annotated[int | None, typer.Option(help="requests per minute", min=1, max=10**9)] = None,
    tpm: Annotated[int | None, typer.Option(help="tokens per minute", min=1, max=10**9)] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="requests at once", min=1, max=10**9)
    ] = None,
    priority: Annotated[int, typer.Option(help="of requests that name none")] = 0,
    max_priority: Annotated[
        int | None, typer.Option(help="no request gets more; default: --priority")
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(help="to the first token, of requests that name no times", min=1)
    ] = None,
    tbt_ms: Annotated[float | None, typer.Option(help="the same, between tokens", min=1)] = None,
    slo_class: Annotated[
        str | None, typer.Option(help="the same: a class of their model's policy")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="date or time (UTC) from which it opens nothing")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="append its entry there instead of printing it")
    ] = None,
) -> None:
    """Make a key. It is printed once and stored nowhere; the file has its SHA-256."""
    from infra.api_key import hash_of, new_key
    from pipeline.access.key import ApiKey
    from pipeline.access.key_file import append_key, entry_of, parse_keys
    from schemas.requests import Slo

    text = new_key()
    tenant = _checked("tenant", process_name, tenant)
    made = ApiKey(
        name=_checked("name", process_name, name or f"{tenant[:35]}-{secrets.token_hex(2)}"),
        digest=hash_of(text.encode()),
        tenant=tenant,
        models=tuple(models.split(",")) if models else None,
        requests_per_minute=rpm,
        tokens_per_minute=tpm,
        concurrent_requests=concurrency,
        priority=priority,
        max_priority=max_priority,
        slo=Slo(
            ttft_ms=ttft_ms or 0.0,
            tbt_ms=tbt_ms or 0.0,
            name=_checked("slo-class", process_name, slo_class) if slo_class else "",
        ),
        expires_unix_s=_checked("expires", _moment, expires) if expires else None,
    )
    entry = entry_of(made)
    parse_keys(entry.encode(), "mesh keys new")
    if file is None:
        print(f"{text}\n\n{entry}", end="")
    else:
        append_key(file, made)
        print(text)
        print(f"{made.name} is in {file}; its key is shown this once", file=sys.stderr)


@keys_app.command("list")
def list_keys(file: File, json: Json = False) -> None:
    """The keys of a file, with their limits and whether they open anything."""
    from pipeline.access.key_file import read_keys

    found = read_keys(file)
    if json:
        import msgspec

        print(msgspec.json.encode([_facts(key) for key in found]).decode())
    else:
        _print_table(found)


@keys_app.command("revoke")
def revoke(file: File, name: Annotated[str, typer.Argument(metavar="NAME")]) -> None:
    """Let a key open nothing any more; its entry stays, with revoked = true."""
    from pipeline.access.key_file import revoke_key

    revoke_key(file, name)
    print(f"{name} is revoked in {file}; running bridges know within a second")


def check_key_file(config: BridgeConfig) -> None:
    """Say at once what is wrong with the file, not when the bus is there.

    Raises:
        ConfigError: the bridge would refuse it.
    """
    from pipeline.access.key_file import read_keys

    if config.api_keys is not None:
        read_keys(config.api_keys)


def _checked(option: str, parse: Callable[[object], Any], raw: str) -> Any:
    try:
        return parse(raw)
    except ValueError as error:
        raise InvalidRequest(f"--{option}: {error}", param=option) from None


def _moment(raw: object) -> float:
    try:
        moment = datetime.fromisoformat(str(raw))
    except ValueError:
        raise ValueError(f"{raw!r} is no date or time like 2027-01-31") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _facts(key: ApiKey) -> dict[str, Any]:
    from infra.api_key import shown

    expires = key.expires_unix_s
    return {
        "name": key.name,
        "tenant": key.tenant,
        "state": key.state(datetime.now(UTC).timestamp()),
        "models": key.models,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "concurrent_requests": key.concurrent_requests,
        "priority": key.priority,
        "max_priority": key.priority if key.max_priority is None else key.max_priority,
        "ttft_ms": key.slo.ttft_ms or None,
        "tbt_ms": key.slo.tbt_ms or None,
        "slo_class": key.slo.name or None,
        "expires": expires and datetime.fromtimestamp(expires, UTC).isoformat(),
        "sha256": shown(key.digest),
    }


def _shown_slo(key: ApiKey) -> str:
    """Its class, and its times as first token / between tokens."""
    slo = key.slo
    times = "/".join(f"{ms:g} ms" if ms else "-" for ms in (slo.ttft_ms, slo.tbt_ms))
    named = [slo.name] if slo.name else []
    return " ".join([*named, *([times] if slo.ttft_ms or slo.tbt_ms else [])]) or "-"


def _print_table(found: tuple[ApiKey, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not found:
        print("no keys")
        return
    columns = ("name", "tenant", "state", "models", "rpm", "tpm", "at once", "priority", "slo",
               "expires", "sha256")  # fmt: skip
    table = Table(*columns, box=None, pad_edge=False)
    for key in found:
        facts = _facts(key)
        span = f"{facts['priority']}..{facts['max_priority']}"
        table.add_row(
            key.name, key.tenant, facts["state"], ", ".join(key.models or ("all",)),
            *(str(facts[limit] or "-") for limit in (
                "requests_per_minute", "tokens_per_minute", "concurrent_requests")),
            str(key.priority) if facts["priority"] == facts["max_priority"] else span,
            _shown_slo(key), (facts["expires"] or "never").removesuffix("+00:00"), facts["sha256"],
        )  # fmt: skip
    width = Console(width=10_000).measure(table).maximum  # whole names, whatever the terminal
    Console(width=width, highlight=False, markup=False).print(table)
