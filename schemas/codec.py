"""Bytes to messages and back.

A message is a msgspec struct; its tag ``<name>/<version>`` stands in the field ``schema``. On the
wire it is a MessagePack map. Unknown fields are ignored, so a newer peer may add some; a missing
field, a wrong type or an unknown tag is a :class:`SchemaError` that names the path.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any, TypeVar, cast

import msgspec

from schemas.errors import SchemaError

TAG_FIELD = "schema"

T = TypeVar("T")  # a message class, or a union of them

_encode = msgspec.msgpack.Encoder().encode
_PATH = re.compile(r" - at (?:`key` in )?`(?P<path>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field=TAG_FIELD):
    """Base of everything that travels on its own. Subclasses give ``tag="<name>/<version>"``."""


def encode(message: Message) -> bytes:
    """``message`` as MessagePack.

    Raises:
        SchemaError: it holds an integer beyond 64 bits, or text that is no Unicode.
    """
    try:
        return _encode(message)
    except (OverflowError, UnicodeEncodeError) as error:
        raise SchemaError(f"can't be sent: {error}", param="$") from error


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[T]) -> T:
    """The message in ``data``; ``kind`` is a message class or a union of them.

    Raises:
        SchemaError: truncated bytes, an unknown tag, a missing field or a wrong type; ``param``
            is the path, ``$`` the message itself. A message without a tag is taken as ``kind``
            when that is one class.
    """
    decode_bytes: Callable[[bytes], T] = _decoder(cast(Hashable, kind)).decode
    return _decoded(decode_bytes, data)


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """:func:`decode` of one ``kind``, for who reads every message of a stream: to find the decoder
    of a union takes as long as to decode a small message."""
    return partial(_decoded, _decoder(cast(Hashable, kind)).decode)


def _decoded(decode_bytes: Callable[[bytes], T], data: bytes) -> T:
    try:
        message: T = decode_bytes(data)
    except msgspec.ValidationError as error:
        raise _schema_error(error) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"not MessagePack: {error}", param="$") from error
    return message


def decode_json(data: bytes, kind: type[T]) -> T:
    """The same for JSON, which admission accepts beside MessagePack (``$`` and errors as above)."""
    try:
        message: T = _json_decoder(cast(Hashable, kind)).decode(data)
    except msgspec.ValidationError as error:
        raise _schema_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(f"not JSON: {error}", param="$") from error
    return message


def is_json(data: bytes) -> bool:
    """Whether ``data``, which is a message in either form, is JSON: ours are objects."""
    return data.lstrip()[:1] == b"{"


def _schema_error(error: Exception) -> SchemaError:
    text = str(error)
    found, missing = _PATH.search(text), _MISSING.search(text)
    path = found.group("path") if found else "$"
    return SchemaError(text, param=f"{path}.{missing.group('field')}" if missing else path)


def tag_of(kind: type[Message]) -> str:
    """The tag ``<name>/<version>`` of a message class."""
    return str(kind.__struct_config__.tag)


def pack_ids(ids: list[int] | tuple[int, ...]) -> bytes:
    """Token ids as packed little-endian uint32.

    Raises:
        SchemaError: an id is negative or over 2**32 - 1.
    """
    try:
        packed = array("I", ids)
    except OverflowError as error:
        raise SchemaError("a token id must fit in 32 bits", param="ids") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`."""
    if len(data) % 4:
        raise SchemaError("packed token ids must be a multiple of 4 bytes", param="ids")
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
