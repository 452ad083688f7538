"""What the two ends of a connection say, and how the bytes of blocks travel.

    reader                              owner
      | -- Enter: lease, our address ----> |   over TCP; refused: the connection ends
      | <----- Welcome: its address ------ |
      | -- Fetch: blocks, tag -----------> |   as many under way as Welcome says
      | <===== header, bytes under tag === |   over UCX; refused: a header alone

The reader has a buffer posted before it asks, so nothing arrives that nobody waits for. Every
Fetch carries the lease: the owner remembers nothing between two of them, and a lease that ended in
mid-transfer ends the transfer. TCP also tells each side when the other is gone.

A message over UCX::

    [0, 4)                      status: 1 sent; else refused and nothing follows
    [4, 4 + 4 n)                generations: uint32 of the n blocks, read after their bytes
    [data_at(n), ... + size)    the bytes
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 2 << 20  # of blocks in one message; a larger block is sent in parts
WINDOW = 4  # messages under way on one connection
MAX_BLOCKS = 1024  # in one message
SENT = 1
_LENGTH = struct.Struct("<I")
_MAX_FRAME = 64 * 1024
_ALIGNMENT = 64


class Enter(msgspec.Struct, frozen=True, kw_only=True):
    """The reader's first word."""

    lease_id: str
    secret: bytes
    address: bytes  # of its UCX worker


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's answer to whoever holds a lease."""

    address: bytes  # of its UCX worker
    num_blocks: int
    block_bytes: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Send these blocks, one behind the other; or of a single one ``size`` bytes from ``start``
    on."""

    lease_id: str
    secret: bytes
    tag: int
    blocks: bytes  # packed uint32
    start: int
    size: int


F = TypeVar("F", Enter, Welcome, Fetch)


class NotOurs(ValueError):
    """What came is no word of this protocol."""


def frame(word: Enter | Welcome | Fetch) -> bytes:
    """A word as it goes over TCP."""
    data = msgspec.msgpack.encode(word)
    return _LENGTH.pack(len(data)) + data


async def read_frame(stream: asyncio.StreamReader, kind: type[F]) -> F:
    """The next word.

    Raises:
        NotOurs: it is none.
        EOFError: there is no next.
        OSError: the connection broke.
    """
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    if length > _MAX_FRAME:
        raise NotOurs(f"a word of {length} bytes")
    try:
        return msgspec.msgpack.decode(await stream.readexactly(length), type=kind)
    except msgspec.MsgspecError as error:
        raise NotOurs(str(error)) from error


def data_at(num_blocks: int) -> int:
    """Where the bytes begin in a message of so many blocks."""
    return -(-4 * (1 + num_blocks) // _ALIGNMENT) * _ALIGNMENT


MESSAGE_BYTES = data_at(MAX_BLOCKS) + CHUNK_BYTES


def write_header(message: Bytes, generations: Sequence[int] | npt.NDArray[np.uint32]) -> None:
    """Mark a message as sent."""
    words = message[: 4 * (1 + len(generations))].view(np.uint32)
    words[0] = SENT
    words[1:] = generations


def clear_header(message: Bytes) -> None:
    """Mark it as refused: a reader before it waits, an owner that sends nothing else."""
    message[:4] = 0


def read_header(message: Bytes, num_blocks: int) -> list[int] | None:
    """The generations; None when refused."""
    words = message[: 4 * (1 + num_blocks)].view(np.uint32)
    return words[1:].tolist() if words[0] == SENT else None
