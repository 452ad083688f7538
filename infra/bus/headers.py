"""The headers of a message on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import nats.errors

from infra.bus.wire import header_block
from schemas.errors import SchemaError


def header_bytes(headers: Mapping[str, str] | None) -> int:
    """What headers add to a message on the wire; the broker's limit counts them."""
    if not headers:
        return 0
    return 12 + sum(_num_bytes(k) + _num_bytes(v) + 4 for k, v in headers.items())


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def header_block_of(headers: Mapping[str, str] | None) -> bytes:
    """As :func:`header_block`; nothing without any.

    Raises:
        SchemaError: a name that is none.
    """
    if not headers:
        return b""
    try:
        return header_block(headers)
    except nats.errors.BadHeaderError as error:
        raise SchemaError(f"{error} can't be a header", param="headers") from error
