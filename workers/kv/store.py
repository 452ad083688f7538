"""A directory of blocks, one file each.

    <hash>-<parent>.kv      a page of header, then the bytes of the block
    <hash>.part             being written; renamed when it is whole

Why a file each, and not slots of one large file: a rename lets a block appear whole or not at all,
an unlink frees its bytes exactly, and whoever needs the room may delete files under us. Names say
which block it is and what comes before it, so a worker that comes back lists the directory and
opens nothing. A block is large against what a file costs: 360 KiB for a model of 135 million
parameters, 2 MiB for one of eight billion.

Nothing is synced. After a power cut a file may hold anything, as after a flipped bit: what is read
is compared with its header and checksum, and what was lost is computed again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pipeline.prefix_hash import HASH_BYTES
from workers.kv.api import BlockName

HEADER_BYTES = 4096  # of which few are used: the block begins at a page
_MAGIC = b"MESHKV\x01\n"
_HEADER = struct.Struct(f"<8s16s{HASH_BYTES}s{HASH_BYTES}sQQ")
_HEX = f"[0-9a-f]{{{2 * HASH_BYTES}}}"
_NAME = re.compile(rf"({_HEX})-({_HEX})\.kv\Z")
_PART = re.compile(rf"{_HEX}\.part\Z")


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A file of the right name and size; ``used_ns`` is when it was last read or written."""

    block: BlockName
    used_ns: int


class BlockStore:
    """The files. Knows of no quota and keeps no books; one process at a time.

    Args:
        fingerprint: of the KV layout, 16 characters.
    """

    def __init__(self, directory: Path, fingerprint: str, block_bytes: int) -> None:
        self.directory = directory
        self.block_bytes = block_bytes
        self.file_bytes = -(-(HEADER_BYTES + block_bytes) // HEADER_BYTES) * HEADER_BYTES
        self._fingerprint = fingerprint.encode()

    def scan(self) -> tuple[list[StoredBlock], int]:
        """What is there, last used last; makes the directory. Opens no file.

        Returns:
            The blocks, and how many torn files were deleted. Files that are none of ours stay.

        Raises:
            OSError: the directory can't be made, read or written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        found: list[StoredBlock] = []
        num_torn = 0
        with os.scandir(self.directory) as entries:
            for entry in entries:
                named = _NAME.match(entry.name)
                if named is None:
                    if _PART.match(entry.name):
                        os.unlink(entry.path)
                    continue
                facts = entry.stat(follow_symlinks=False)
                if facts.st_size != HEADER_BYTES + self.block_bytes:
                    os.unlink(entry.path)
                    num_torn += 1
                    continue
                block = BlockName(
                    block_hash=bytes.fromhex(named[1]), parent=bytes.fromhex(named[2])
                )
                found.append(StoredBlock(block, facts.st_mtime_ns))
        found.sort(key=lambda stored: stored.used_ns)
        return found, num_torn

    def write(self, block: BlockName, data: memoryview, checksum: int) -> None:
        """Keep a block, whole or not at all.

        Raises:
            OSError: it can't be written; nothing of it is left, or ``discard`` finds it.
            ValueError: not the bytes of one block, or no name of one.
        """
        if len(data) != self.block_bytes:
            raise ValueError(f"{len(data)} bytes are no block of {self.block_bytes}")
        header = self._header(block, checksum).ljust(HEADER_BYTES, b"\0")
        part = self._part(block)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(descriptor, header, data)
        finally:
            os.close(descriptor)
        os.rename(part, self._path(block))

    def discard(self, block: BlockName) -> None:
        """Delete what a failed ``write`` left.

        Raises:
            OSError: it can't be deleted.
        """
        self._part(block).unlink(missing_ok=True)

    def read(self, block: BlockName, into: memoryview) -> int | None:
        """Read a block into ``into`` and check it.

        Returns:
            Its checksum; None when the file is torn, foreign or has another checksum.

        Raises:
            OSError: it can't be read; FileNotFoundError: it isn't there.
        """
        descriptor = os.open(self._path(block), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = bytearray(HEADER_BYTES)
            if not _read_all(descriptor, header, into):
                return None
            with contextlib.suppress(OSError):  # of a disk that can only be read
                os.utime(descriptor)  # the order in which the next ``scan`` finds them
        finally:
            os.close(descriptor)
        checksum: int = xxhash.xxh3_64_intdigest(into)
        return checksum if header.startswith(self._header(block, checksum)) else None

    def delete(self, block: BlockName) -> None:
        """Delete a block; one that isn't there is deleted.

        Raises:
            OSError: it can't be deleted.
        """
        self._path(block).unlink(missing_ok=True)

    def _header(self, block: BlockName, checksum: int) -> bytes:
        if len(block.block_hash) != HASH_BYTES or len(block.parent) != HASH_BYTES:
            raise ValueError(f"{block} is no name of a block")
        return _HEADER.pack(
            _MAGIC, self._fingerprint, block.block_hash, block.parent, self.block_bytes, checksum
        )

    def _path(self, block: BlockName) -> Path:
        return self.directory / f"{block.block_hash.hex()}-{block.parent.hex()}.kv"

    def _part(self, block: BlockName) -> Path:
        return self.directory / f"{block.block_hash.hex()}.part"


def delete_blocks(directory: Path) -> int:
    """Delete all blocks in a directory, and it if that leaves it empty; how many there were.

    Raises:
        OSError: something can't be deleted.
    """
    num_deleted = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if _NAME.match(entry.name) or _PART.match(entry.name):
                os.unlink(entry.path)
                num_deleted += 1
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    return num_deleted


def _write_all(descriptor: int, header: bytes, data: memoryview) -> None:
    rest = [memoryview(header), data]
    while any(map(len, rest)):  # once, or more often on a disk that is just full
        done = os.writev(descriptor, rest)
        if done == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_first = min(done, len(rest[0]))
        rest = [rest[0][num_first:], rest[1][done - num_first :]]


def _read_all(descriptor: int, header: bytearray, into: memoryview) -> bool:
    """Whether the file was long enough, and not longer."""
    done = os.readv(descriptor, [header, into])
    if done < HEADER_BYTES:
        return False
    while (place := done - HEADER_BYTES) < len(into):
        got = os.readv(descriptor, [into[place:]])
        if got == 0:
            return False
        done += got
    return os.read(descriptor, 1) == b""
