"""Dead letters for the eye: what they are about, without what people wrote to a model. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.dead_letter_box import FiledLetter
from schemas.codec import is_json

# Text that may be shown; all other text, bytes and lists may be a prompt, or a secret.
_SHOWN = frozenset((
    "schema", "request_id", "model", "revision", "served", "reader", "worker", "owner", "role",
    "tenant", "fingerprint", "lease_id",
))  # fmt: skip


def summary(filed: FiledLetter) -> dict[str, Any]:
    """One line of a list."""
    letter = filed.letter
    return {
        "id": filed.seq,
        "unix_ms": letter.unix_ms,
        "subject": letter.subject,
        "stage": letter.stage,
        "code": letter.code,
        "reason": letter.reason,
        "request_id": filed.request_id,
        "process": letter.process,
        "payload_bytes": max(letter.payload_bytes, len(letter.payload)),
    }


def details(filed: FiledLetter, *, with_payload: bool) -> dict[str, Any]:
    """Everything but the payload, and that as far as it may be shown.

    Args:
        with_payload: show it whole: prompts, and the secrets of leases.
    """
    shown: dict[str, Any] = summary(filed) | {"headers": dict(filed.letter.headers)}
    payload = filed.letter.payload
    if not filed.is_whole:
        shown["payload_kept_bytes"] = len(payload)
    try:
        fields = (msgspec.json if is_json(payload) else msgspec.msgpack).decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown["payload"] = payload.hex() if with_payload else _size(payload)
        shown["payload_error"] = str(error)
        return shown
    shown["payload"] = _plain(fields) if with_payload else outline(fields)
    return shown


def outline(value: Any, key: str = "") -> Any:
    """``value`` with numbers and names as they are, and the size of everything else."""
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: outline(inner, name) for name, inner in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and key in _SHOWN:
        return value
    return _size(value)


def _size(value: Any) -> str:
    for kind, word in ((str, "characters"), (bytes, "bytes")):
        if isinstance(value, kind):
            return f"({len(value)} {word})"
    return f"({len(value)} entries)" if isinstance(value, list | dict) else "(hidden)"


def _plain(value: Any) -> Any:
    """``value`` as JSON has it; bytes in hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return {_key(name): _plain(inner) for name, inner in value.items()}
    return value if isinstance(value, str | bool | int | float | None) else str(value)


def _key(name: Any) -> str:
    return name.hex() if isinstance(name, bytes) else str(name)
