"""The TOML file of policies: what each model promises, and what it does over budget.

    [models.llama-70b]                   "*": all that have no table of their own
    over_budget = ["wait", "clamp", "fallback", "refuse"]    in this order; default: refuse
    max_wait_s = 10                      the longest that a request waits for room
    clamp_floor = 64                     tokens that a clamp leaves to each choice at least
    fallback = "llama-8b"                the model that answers instead
    enter = 1.0                          a budget is over above this part of it, ...
    leave = 0.8                          ... until it is at or under this one
    horizon_s = 30                       decode time counts as far ahead
    default_class = "chat"               of requests that name neither class nor times
    classes.chat = { ttft_ms = 500, tbt_ms = 50 }
    classes.batch = { ttft_ms = 30000 }
    shares = { "-1" = 0.5, "0" = 0.9 }   of the budget, to requests of this priority and less

The file is read again when it changes. One that can't be used changes nothing, and is logged.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from infra.file_stamp import FileStamp
from infra.log import Logger
from infra.parse import number, process_name, text, whole
from pipeline.policy import MAX_SLO_MS, RUNGS, FixedPolicies, Policy, Rung
from schemas.errors import ConfigError
from schemas.requests import Slo

ANY_MODEL = "*"
_KEY = "control.policies"
_TABLE = "models"
_MS = number(1, MAX_SLO_MS)
_PRIORITY = whole(-(2**31), 2**31 - 1)
_SHARE = number(0.01, 1)


def _rungs(raw: object) -> tuple[Rung, ...]:
    if not isinstance(raw, list) or not raw or any(one not in RUNGS for one in raw):
        raise ValueError(f"{raw!r} is no list of {', '.join(RUNGS)}")
    if len(set(raw)) < len(raw):
        raise ValueError("something stands there twice")
    if "refuse" in raw[:-1]:
        raise ValueError("nothing comes after refuse")
    return tuple(raw)


def _classes(raw: object) -> dict[str, Slo]:
    if not isinstance(raw, Mapping):
        raise ValueError("no table of classes")
    return {process_name(name): _slo(name, times) for name, times in raw.items()}


def _slo(name: str, raw: object) -> Slo:
    if not isinstance(raw, Mapping) or not raw or raw.keys() - {"ttft_ms", "tbt_ms"}:
        raise ValueError(f"{name}: give ttft_ms, tbt_ms or both, and nothing else")
    try:
        return Slo(name=name, **{field: _MS(value) for field, value in raw.items()})
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _shares(raw: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(raw, Mapping):
        raise ValueError("no table of priorities")
    shares = tuple(sorted((_PRIORITY(key), _SHARE(value)) for key, value in raw.items()))
    if [share for _, share in shares] != sorted(share for _, share in shares):
        raise ValueError("a lower priority has the greater share")
    return shares


# Name in the file: name in ``Policy``, and what reads the value.
_FIELDS: dict[str, tuple[str, Callable[[object], Any]]] = {
    "over_budget": ("rungs", _rungs),
    "max_wait_s": ("max_wait_s", number(0, 600)),
    "clamp_floor": ("clamp_floor", whole(1, 1_000_000)),
    "fallback": ("fallback", text),
    "enter": ("enter", number(0.01, 100)),
    "leave": ("leave", number(0.01, 100)),
    "horizon_s": ("horizon_s", number(0.1, 3600)),
    "default_class": ("default_class", process_name),
    "classes": ("classes", _classes),
    "shares": ("shares", _shares),
}


def read_policies(path: Path, models: Collection[str] | None = None) -> FixedPolicies:
    """All policies of the file.

    Args:
        models: those that are served; None: not known, so any fallback may be.

    Raises:
        ConfigError: it can't be read or understood, names a model as a fallback that is not
            served, or fallbacks lead in a circle; ``param`` is the field's path in it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param=_KEY) from None
    return parse_policies(data, str(path), models)


def parse_policies(
    data: bytes, origin: str, models: Collection[str] | None = None
) -> FixedPolicies:
    """The policies of a file's text; errors as :func:`read_policies`, naming ``origin``."""
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{origin} is no TOML: {error}", param=_KEY) from None
    for name in document:
        if name != _TABLE:
            raise ConfigError(f"{origin}: {name!r} is none of: [{_TABLE}.NAME]", param=name)
    tables = document.get(_TABLE, {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{origin}: [{_TABLE}.NAME] are tables", param=_TABLE)
    policies = {name: _policy(name, table, origin) for name, table in tables.items()}
    _check_fallbacks(policies, origin, models)
    return FixedPolicies(policies)


def _failure(origin: str, model: str, field: str, reason: str) -> ConfigError:
    where = f"{_TABLE}.{model}" + (f".{field}" if field else "")
    return ConfigError(f"{origin}: {where}: {reason}", param=where)


def _policy(name: str, table: object, origin: str) -> Policy:
    if not isinstance(table, Mapping):
        raise _failure(origin, name, "", "no table")
    values: dict[str, Any] = {}
    for field, raw in table.items():
        if field not in _FIELDS:
            raise _failure(origin, name, field, f"none of {', '.join(_FIELDS)}")
        target, parse = _FIELDS[field]
        try:
            values[target] = parse(raw)
        except ValueError as error:
            raise _failure(origin, name, field, str(error)) from None
    policy = Policy(**values)
    for field, is_wrong, reason in _relations(policy):
        if is_wrong:
            raise _failure(origin, name, field, reason)
    return policy


def _relations(policy: Policy) -> list[tuple[str, bool, str]]:
    default = policy.default_class
    return [
        ("leave", policy.leave > policy.enter, "is over enter: a budget would never be left"),
        ("default_class", bool(default) and default not in policy.classes, "is no class here"),
        ("fallback", "fallback" in policy.rungs and not policy.fallback, "missing"),
        (
            "over_budget",
            bool(policy.fallback) and "fallback" not in policy.rungs,
            "fallback is named below, and does not stand here",
        ),
    ]


def _check_fallbacks(
    policies: Mapping[str, Policy], origin: str, models: Collection[str] | None
) -> None:
    found = FixedPolicies(policies)
    for name, policy in policies.items():
        if policy.fallback and models is not None and policy.fallback not in models:
            reason = f"no model is called {policy.fallback!r}"
            raise _failure(origin, name, "fallback", reason)
        seen, model = [], name if name != ANY_MODEL else policy.fallback
        while model and model not in seen:
            seen.append(model)
            model = found.of(model).fallback
        if model:
            circle = " -> ".join([*seen[seen.index(model) :], model])
            raise _failure(origin, name, "fallback", f"leads in a circle: {circle}")


class PolicyFile:
    """The policies of a file, as it is now.

    Args:
        path: None: no policies, so nothing is ever over budget but by times of its own.
        models: asked at each reading: those that are served.

    Raises:
        ConfigError: the file can't be used; names the field.
    """

    def __init__(
        self, path: Path | None, log: Logger, *, models: Callable[[], Collection[str]]
    ) -> None:
        self._path = path
        self._models = models
        self._log = log
        self._stamp = FileStamp(path)
        self._refused = ""
        self._policies = FixedPolicies()
        if path is not None:
            self._read(path)
            log.info("policies_read", models=sorted(self._policies.by_model))

    def of(self, model: str) -> Policy:
        """See :class:`pipeline.policy.Policies`."""
        return self._policies.of(model)

    async def run(self, every_s: float) -> None:
        """Look for changes of the file. For ever."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def refresh(self) -> None:
        """Take the file's policies if it has changed. One that can't be used changes nothing, and
        is logged once."""
        if self._path is None or not self._stamp.has_news:
            return
        before = self._policies
        try:
            self._read(self._path)
        except ConfigError as error:
            if error.message != self._refused:
                self._log.error("policies_refused", field=error.param, reason=error.message)
            self._refused = error.message
        else:
            self._refused = ""
            if self._policies != before:
                self._log.info("policies_read", models=sorted(self._policies.by_model))

    def _read(self, path: Path) -> None:
        self._stamp.take()
        self._policies = read_policies(path, self._models())
