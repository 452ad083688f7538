"""Worker profiles as TOML files: those that are shipped, and a user's own.

A file has the fields of ``WorkerProfile``, with the coefficients in a table ``[costs]``; whatever
has a default may be left out::

    name = "h100-llama-8b"
    kv_tokens = 411000
    [costs]
    prefill_base_ms = 6.0
    …
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from schemas.codec import TAG_FIELD
from schemas.errors import ConfigError
from schemas.profiles import StepCosts, WorkerProfile

_SHIPPED: Final = files("pipeline.worker_profiles")
_SUFFIX: Final = ".toml"
_PARAM: Final = "worker.profile"


@cache
def shipped_profiles() -> Mapping[str, WorkerProfile]:
    """The profiles that come with the mesh, by name, in order."""
    found = {}
    for entry in _SHIPPED.iterdir():
        if entry.name.endswith(_SUFFIX):
            name = entry.name.removesuffix(_SUFFIX)
            found[name] = parse_profile(entry.read_text(encoding="utf-8"), entry.name, name)
    return dict(sorted(found.items()))


def is_file_name(text: str) -> bool:
    """Whether a profile is named by its file: there is a slash in it, or it ends in ``.toml``."""
    return "/" in text or text.endswith(_SUFFIX)


def find_profile(text: str, registered: Mapping[str, WorkerProfile] | None = None) -> WorkerProfile:
    """The profile that a person names: a file, or one that is registered, or a shipped one.

    Raises:
        ConfigError: there is none of this name, and the message lists those that there are; or the
            file can't be read or used.
    """
    if is_file_name(text):
        return read_profile(Path(text))
    known = {**shipped_profiles(), **(registered or {})}
    if text not in known:
        raise ConfigError(
            f"no profile is called {text!r}; there are {', '.join(sorted(known))}, "
            "and files, such as ./own.toml",
            param=_PARAM,
        )
    return known[text]


def read_profile(file: Path) -> WorkerProfile:
    """The profile in ``file``; its name is the file's where it says none.

    Raises:
        ConfigError: it can't be read, is no TOML, or is not what a profile has to be.
    """
    try:
        content = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(f"can't read {file}: {reason}", param=_PARAM) from error
    return parse_profile(content, str(file), file.stem)


def parse_profile(content: str, where: str, name: str = "") -> WorkerProfile:
    """A profile out of TOML text.

    Args:
        where: what the text is called in errors.
        name: of the profile, where it says none.

    Raises:
        ConfigError: as :func:`read_profile`.
    """
    try:
        fields = {"name": name, **tomllib.loads(content)}
        profile = msgspec.convert(fields, _Strict, str_keys=True).profile()
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where} is no profile: {error}", param=_PARAM) from error
    check_profile(profile, where)
    return profile


def check_profile(profile: WorkerProfile, where: str) -> None:
    """Raise ConfigError unless every cost is a number from 0 on, some are above, and it has a name.

    Args:
        where: what it is called in errors.
    """
    values = msgspec.structs.asdict(profile.costs)
    for key, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{where}: {key} is {value:g}, not a number from 0 on", param=_PARAM)
    if not any(values.values()):
        raise ConfigError(f"{where}: every cost is 0", param=_PARAM)
    if not profile.name.strip():
        raise ConfigError(f"{where}: it has no name", param=_PARAM)
    if profile.kv_tokens < 0 or profile.kv_token_bytes < 0:
        raise ConfigError(f"{where}: kv_tokens and kv_token_bytes are from 0 on", param=_PARAM)


def format_profile(profile: WorkerProfile) -> str:
    """``profile`` as a TOML file, which :func:`parse_profile` reads back."""
    values = msgspec.to_builtins(profile)
    costs = values.pop("costs")
    values.pop(TAG_FIELD)
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    lines += ["", "[costs]", *(f"{key} = {_toml(value)}" for key, value in costs.items())]
    return "\n".join(lines) + "\n"


def _toml(value: str | int | float) -> str:
    # A JSON string is a TOML string, but for one character that only the latter must escape.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


class _StrictCosts(StepCosts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A misspelt coefficient would be taken for one that is missing."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file may say."""

    name: str
    costs: _StrictCosts
    hardware: str = ""
    engine: str = ""
    served: str = ""
    kv_tokens: int = 0
    kv_token_bytes: int = 0
    prefill_error: float = 0.0
    decode_error: float = 0.0
    source: str = ""
    measured_unix_s: int = 0

    def profile(self) -> WorkerProfile:
        """The same as the message that it is elsewhere."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return WorkerProfile(**{**values, "costs": StepCosts(**msgspec.structs.asdict(self.costs))})
