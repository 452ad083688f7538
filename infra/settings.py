"""How a setting gets its value: default, then TOML file, then environment, then flag.

A configuration class is a frozen dataclass whose fields are made by :func:`setting`; each field
knows how to parse a value and what to call itself. The three spellings follow from the field and
the class's ``table``: key ``kv_memory`` of table ``worker`` is ``kv_memory`` under ``[worker]`` in
the file, ``MESH_WORKER_KV_MEMORY`` in the environment and ``--kv-memory`` on the command line.
The table ``mesh``, shared by all, has no name in the environment: ``MESH_DATA``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

from schemas.errors import ConfigError

SHARED_TABLE = "mesh"
TABLES = (SHARED_TABLE, "control", "worker", "bridge", "up")
_METADATA = "setting"


class Configured(Protocol):
    """A dataclass whose settings stand in one table."""

    table: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


C = TypeVar("C", bound=Configured)
Parser = Callable[[object], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a field needs beside its default.

    ``parse`` turns text (environment, flag) or a TOML value into the field's value, or raises
    ValueError with what is wrong. ``many`` settings may be given several times; a comma separates
    them in the environment. A ``secret`` never stands on a command line that others can read.
    """

    parse: Parser
    help: str
    flag: str
    many: bool = False
    secret: bool = False


def setting(
    default: Any,
    parse: Parser,
    help: str,
    *,
    flag: str = "",
    many: bool = False,
    secret: bool = False,
) -> Any:
    """A dataclass field that is a setting; a callable ``default`` is a factory."""
    made = Setting(parse=parse, help=help, flag=flag, many=many, secret=secret)
    if callable(default):
        return field(default_factory=default, metadata={_METADATA: made})
    return field(default=default, metadata={_METADATA: made})


def settings_of(kind: type[Configured]) -> Iterator[tuple[Field[Any], Setting]]:
    """Each setting of ``kind`` itself, with its flag filled in; nested configurations are not
    entered."""
    for one in fields(kind):
        found: Setting | None = one.metadata.get(_METADATA)
        if found is not None:
            flag = found.flag or "--" + one.name.replace("_", "-")
            yield (
                one,
                Setting(
                    parse=found.parse,
                    help=found.help,
                    flag=flag,
                    many=found.many,
                    secret=found.secret,
                ),
            )


def variable(table: str, key: str) -> str:
    """The environment variable of a setting."""
    prefix = "MESH_" if table == SHARED_TABLE else f"MESH_{table.upper()}_"
    return prefix + key.upper()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where values come from, weakest first: ``defaults`` (by field name, over the class's own),
    ``tables`` of the file, ``env``, ``flags`` (by field name; None means not given)."""

    defaults: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, object]]
    file: str
    env: Mapping[str, str]
    flags: Mapping[str, object]

    @classmethod
    def gather(
        cls,
        *,
        file: Path | None = None,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Sources:
        """Read ``file`` if there is one; ``env`` is this process's own unless given.

        Raises:
            ConfigError: the file can't be read, is no TOML, or has a table that no role has.
        """
        return cls(
            defaults=defaults or {},
            tables=_read_tables(file) if file else {},
            file=str(file or ""),
            env=os.environ if env is None else env,
            flags=flags or {},
        )


def _read_tables(path: Path) -> dict[str, Mapping[str, object]]:
    try:
        with path.open("rb") as handle:
            document = tomllib.load(handle)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param="--config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}", param="--config") from error
    for name, table in document.items():
        if name not in TABLES or not isinstance(table, dict):
            raise ConfigError(
                f"{path}: [{name}] is none of the tables {', '.join(TABLES)}", param=name
            )
    return document


def load(kind: type[C], sources: Sources) -> C:
    """Build ``kind`` from ``sources``; fields that are configurations themselves are built from
    their own tables.

    Raises:
        ConfigError: a value that does not parse, an unknown key in the file's table, or an
            environment variable with this table's prefix that names no setting. ``param`` is the
            key, the message says where the value came from.
    """
    known = {one.name: found for one, found in settings_of(kind)}
    _refuse_unknown(kind.table, known, sources)
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for one in fields(kind):
        if one.name in known:
            values[one.name] = _value(kind.table, one, known[one.name], sources)
        elif is_dataclass(hints[one.name]):
            values[one.name] = load(hints[one.name], sources)
    return kind(**values)


def _refuse_unknown(table: str, known: Mapping[str, Setting], sources: Sources) -> None:
    for key in sources.tables.get(table, {}):
        if key not in known:
            raise ConfigError(
                f"{sources.file}: [{table}] has no setting {key!r}", param=f"{table}.{key}"
            )
    if table == SHARED_TABLE:
        return  # its variables share their prefix with what else is called MESH_*
    prefix = variable(table, "")
    for name in sources.env:
        if name.startswith(prefix) and name.removeprefix(prefix).lower() not in known:
            raise ConfigError(f"{name}: [{table}] has no such setting", param=name)


def _value(table: str, one: Field[Any], found: Setting, sources: Sources) -> Any:
    given = sources.flags.get(one.name)
    name = variable(table, one.name)
    key = f"{table}.{one.name}"
    if given is not None and given != []:
        return _parse(found, given, found.flag, key)
    if name in sources.env:
        return _parse(found, sources.env[name], name, key)
    stored = sources.tables.get(table, {})
    if one.name in stored:
        return _parse(found, stored[one.name], f"{sources.file}: {key}", key)
    if one.name in sources.defaults:
        return sources.defaults[one.name]
    return one.default if one.default_factory is MISSING else one.default_factory()


def _parse(found: Setting, raw: object, origin: str, key: str) -> Any:
    try:
        return found.parse(raw)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}", param=key) from error


def secrets_of(config: Configured) -> dict[str, str]:
    """Environment variables that give every secret of ``config`` itself, where it has a value, that
    value again."""
    found = {}
    for one, declared in settings_of(type(config)):
        value = getattr(config, one.name)
        if declared.secret and value:
            text = ",".join(map(str, value)) if declared.many else str(value)
            found[variable(config.table, one.name)] = text
    return found


def flags_of(config: Configured) -> list[str]:
    """A command line that gives every setting of ``config``, nested configurations too, its
    value again; secrets are left out (pass them in the environment), and so is what has none."""
    flags: list[str] = []
    own = {one.name: found for one, found in settings_of(type(config))}
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name in own:
            found = own[one.name]
            if not found.secret and value is not None:
                flags += [f"{found.flag}={item}" for item in (value if found.many else (value,))]
        elif is_dataclass(value):
            flags += flags_of(value)  # type: ignore[arg-type]
    return flags
