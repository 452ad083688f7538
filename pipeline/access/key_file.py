"""The TOML file of API keys: read whole, extended, and keys in it revoked.

    [keys.acme-1]                        the key's name, for log lines
    sha256 = "9f86d0…"                   of the key; the key itself stands nowhere
    tenant = "acme"
    models = ["smollm2-135m", "qwen*"]   default: all
    requests_per_minute = 60             these three: default none
    tokens_per_minute = 100000
    concurrent_requests = 8
    priority = 0                         of requests that name none
    max_priority = 0                     default: as priority
    ttft_ms = 500                        these three: of requests that name no times of their own;
    tbt_ms = 50                          default none
    slo_class = "chat"
    expires = 2027-01-01T00:00:00Z       default: never
    revoked = true

People edit it, too: changes here leave their comments and order alone.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from infra.api_key import HashedKey, sha256_hex
from infra.parse import number, process_name, text, whole
from pipeline.access.budgets import MAX_KEYS
from pipeline.access.key import ApiKey
from pipeline.policy import MAX_SLO_MS
from schemas.errors import ConfigError
from schemas.requests import Slo

_TABLE = "keys"
_MAX_LIMIT = 10**9
_MS = number(1, MAX_SLO_MS)
_PRIORITY = whole(-(2**31), 2**31 - 1)


def _names(raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list) or not raw:
        raise ValueError("no list of model names")
    names = tuple(text(one) for one in raw)
    if not all(name.isprintable() for name in names):
        raise ValueError("a model's name has characters that can't be shown")
    return names


def _moment(raw: object) -> float:
    if isinstance(raw, date) and not isinstance(raw, datetime):
        raw = datetime(raw.year, raw.month, raw.day)
    if not isinstance(raw, datetime):
        raise ValueError(f"{raw!r} is no date or time")
    return (raw if raw.tzinfo else raw.replace(tzinfo=UTC)).timestamp()


def _yes_or_no(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError(f"{raw!r} is neither true nor false")
    return raw


# Name in the file: name in ``ApiKey``, and what reads the value.
_FIELDS: dict[str, tuple[str, Callable[[object], Any]]] = {
    "sha256": ("digest", sha256_hex),
    "tenant": ("tenant", process_name),
    "models": ("models", _names),
    "requests_per_minute": ("requests_per_minute", whole(1, _MAX_LIMIT)),
    "tokens_per_minute": ("tokens_per_minute", whole(1, _MAX_LIMIT)),
    "concurrent_requests": ("concurrent_requests", whole(1, _MAX_LIMIT)),
    "priority": ("priority", _PRIORITY),
    "max_priority": ("max_priority", _PRIORITY),
    "ttft_ms": ("ttft_ms", _MS),
    "tbt_ms": ("tbt_ms", _MS),
    "slo_class": ("name", process_name),
    "expires": ("expires_unix_s", _moment),
    "revoked": ("is_revoked", _yes_or_no),
}
_NEEDED = ("sha256", "tenant")
_SLO = ("ttft_ms", "tbt_ms", "name")  # fields of its ``slo``


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """All keys of the file.

    Raises:
        ConfigError: it can't be read, or not be understood: ``param`` is the field's path in it,
            and no key of it may be used.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param="bridge.api_keys") from None
    return parse_keys(data, str(path))


def parse_keys(data: bytes, origin: str) -> tuple[ApiKey, ...]:
    """The keys of a file's text; errors as :func:`read_keys`, naming ``origin``."""
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{origin} is no TOML: {error}", param="bridge.api_keys") from None
    for name in document:
        if name != _TABLE:
            raise ConfigError(f"{origin}: {name!r} is none of: [{_TABLE}.NAME]", param=name)
    tables = document.get(_TABLE, {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{origin}: [{_TABLE}.NAME] are tables", param=_TABLE)
    if len(tables) > MAX_KEYS:
        raise ConfigError(f"{origin}: over {MAX_KEYS} keys", param=_TABLE)
    keys = tuple(_key(name, table, origin) for name, table in tables.items())
    _refuse_twins(keys, origin)
    return keys


def _key(name: str, table: object, origin: str) -> ApiKey:
    def fail(field: str, reason: str) -> ConfigError:
        where = f"{_TABLE}.{name}" + (f".{field}" if field else "")
        return ConfigError(f"{origin}: {where}: {reason}", param=where)

    if not isinstance(table, Mapping):
        raise fail("", "no table")
    values: dict[str, Any] = {}
    for field, raw in table.items():
        if field not in _FIELDS:
            raise fail(field, f"none of {', '.join(_FIELDS)}")
        target, parse = _FIELDS[field]
        try:
            values[target] = parse(raw)
        except ValueError as error:
            raise fail(field, str(error)) from None
    for field in _NEEDED:
        if field not in table:
            raise fail(field, "missing")
    try:
        slo = Slo(**{field: values.pop(field) for field in _SLO if field in values})
        return ApiKey(name=process_name(name), slo=slo, **values)
    except ValueError as error:
        raise fail("", str(error)) from None


def _refuse_twins(keys: tuple[ApiKey, ...], origin: str) -> None:
    seen: dict[bytes, str] = {}
    for key in keys:
        if key.digest in seen:
            raise ConfigError(
                f"{origin}: {_TABLE}.{key.name} is the same key as {_TABLE}.{seen[key.digest]}",
                param=f"{_TABLE}.{key.name}.sha256",
            )
        seen[key.digest] = key.name


def keys_of_settings(given: tuple[HashedKey, ...]) -> tuple[ApiKey, ...]:
    """Keys from the configuration itself: no limits, named after their hashes."""
    return tuple(
        ApiKey(name=f"key-{one.digest.hex()[:8]}", digest=one.digest, tenant=one.tenant)
        for one in given
    )


# --- written ---------------------------------------------------------------------------------


def entry_of(key: ApiKey) -> str:
    """The table that :func:`read_keys` reads as ``key``."""
    lines = [f"[{_TABLE}.{key.name}]", f'sha256 = "{key.digest.hex()}"', f'tenant = "{key.tenant}"']
    if key.models is not None:
        lines.append(f"models = [{', '.join(map(_quoted, key.models))}]")
    for field in ("requests_per_minute", "tokens_per_minute", "concurrent_requests"):
        value = getattr(key, field)
        if value is not None:
            lines.append(f"{field} = {value}")
    if key.priority:
        lines.append(f"priority = {key.priority}")
    if key.max_priority is not None:
        lines.append(f"max_priority = {key.max_priority}")
    lines += _slo_lines(key.slo)
    if key.expires_unix_s is not None:
        moment = datetime.fromtimestamp(key.expires_unix_s, UTC)
        lines.append(f"expires = {moment.isoformat().replace('+00:00', 'Z')}")
    if key.is_revoked:
        lines.append("revoked = true")
    return "\n".join(lines) + "\n"


def _slo_lines(slo: Slo) -> list[str]:
    times = (("ttft_ms", slo.ttft_ms), ("tbt_ms", slo.tbt_ms))
    lines = [f"{field} = {time_ms}" for field, time_ms in times if time_ms]
    return [*lines, f'slo_class = "{slo.name}"'] if slo.name else lines


def _quoted(name: str) -> str:
    """A TOML basic string: one of JSON, whose names of halves of a character TOML does not know."""
    return json.dumps(name, ensure_ascii=False)


def append_key(path: Path, key: ApiKey) -> None:
    """Add ``key`` to the file, which is made when missing, for its owner only.

    Raises:
        ConfigError: the file can't be read as it is or written, or has a key of this name.
    """
    before = path.read_bytes() if path.exists() else b""
    if any(other.name == key.name for other in parse_keys(before, str(path))):
        raise ConfigError(f"{path} has a key {key.name} already", param=f"{_TABLE}.{key.name}")
    gap = b"" if not before else b"\n" if before.endswith(b"\n") else b"\n\n"
    _write(path, before + gap + entry_of(key).encode())


def revoke_key(path: Path, name: str) -> None:
    """Put ``revoked = true`` under the key's header; nothing else changes.

    Raises:
        ConfigError: the file can't be read or written, has no such key, or has it in a form
            where only a person can tell what to change.
    """
    before = read_keys(path)
    if all(key.name != name for key in before):
        raise ConfigError(f"{path} has no key {name}", param=f"{_TABLE}.{name}")
    if any(key.name == name and key.is_revoked for key in before):
        return
    header = re.compile(
        rf"""^[ \t]*\[[ \t]*{_TABLE}[ \t]*\.[ \t]*(["']?){re.escape(name)}\1[ \t]*\].*$""",
        re.MULTILINE,
    )
    old = path.read_text()
    new = header.sub(lambda found: f"{found[0]}\nrevoked = true", old, count=1)
    wanted = [key.is_revoked or key.name == name for key in before]
    try:
        is_done = [key.is_revoked for key in parse_keys(new.encode(), str(path))] == wanted
    except ConfigError:  # revoked = false stands there
        is_done = False
    if not is_done:
        raise ConfigError(
            f"{path}: set revoked = true for [{_TABLE}.{name}] by hand", param=f"{_TABLE}.{name}"
        )
    _write(path, new.encode())


def _write(path: Path, data: bytes) -> None:
    """Replace the file at once, so that a bridge reads the old one or the new one."""
    parse_keys(data, str(path))
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"can't write {path}: {error.strerror}", param=str(path)) from error
