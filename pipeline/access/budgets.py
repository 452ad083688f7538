"""What each key has used, in one file that all bridges of a host share.

    <data>/api-key-budgets                       mode 0600, 2.3 MiB, mapped by every bridge
    ├── page 0    magic, boot id; slots ever taken; byte s is locked while slot s lives
    └── records   [MAX_KEYS]                     one per key that was used, found by its hash
        ├── 32 bytes   SHA-256 of the key        all zero: free
        ├── 2 doubles  requests: level, at       see bucket.py; times are CLOCK_MONOTONIC, which all
        ├── 2 doubles  tokens: level, at         processes of a host share until it boots again
        └── [NUM_SLOTS] uint32                   requests open now, one number per process

A process takes a slot by locking its byte and alone writes that column; the sum of a row is what
the key has open. The kernel lets go of a dead process's byte, and who finds a key full looks
whether that is so and takes its numbers out. Two hosts have two files and count each for itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from infra.file_locks import FileMutex, is_locked_elsewhere, lock_byte
from pipeline.access.bucket import Bucket
from schemas.errors import ConfigError, NoCapacity

FILE = "api-key-budgets"
MAX_KEYS = 4096
NUM_SLOTS = 128

_MAGIC = b"mesh-budgets/1\n\x00"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PAGE = 4096
_LEVELS = struct.Struct("<4d")
_COUNT = struct.Struct("<I")
_SLOTS_AT = 256  # in page 0: how many slots were ever taken since boot; those above are zero
_DIGEST = 32
_COUNTS = _DIGEST + _LEVELS.size  # where they begin in a record
_RECORD = _COUNTS + NUM_SLOTS * _COUNT.size
_SIZE = _PAGE + MAX_KEYS * _RECORD
_FREE = bytes(_DIGEST)
_IDLE_S = 3600.0  # a record that was not used for so long may go to another key
_PATIENCE_S = 1.0  # one that is not frozen leaves the mutex within microseconds, once it runs


class Account:
    """One key's numbers while this process holds them: ``with`` keeps the changes at its end."""

    __slots__ = ("_budgets", "_offset", "requests", "tokens")

    def __init__(self, budgets: Budgets, offset: int, levels: tuple[float, ...]) -> None:
        self.requests = Bucket(levels[0], levels[1])
        self.tokens = Bucket(levels[2], levels[3])
        self._budgets = budgets
        self._offset = offset

    def num_open(self, limit: int) -> int:
        """Requests open in all processes; those of dead ones are taken out before ``limit`` is
        said to be reached."""
        total = self._budgets.num_open(self._offset)
        return total if total < limit else self._budgets.without_dead(self._offset)

    def enter(self) -> None:
        """One more request is open in this process."""
        self._budgets.add_open(self._offset, 1)

    def leave(self) -> None:
        """One less."""
        self._budgets.add_open(self._offset, -1)

    def __enter__(self) -> Account:
        return self

    def __exit__(self, *_: object) -> None:
        self._budgets.store(self._offset, self.requests, self.tokens)


class Budgets:
    """The file, as one process uses it; made by :func:`open_budgets`.

    Args:
        descriptor: of the file, open while this is used.
        patience_s, on_stuck: of the mutex; while a process sits frozen on it a charge may be lost.
        now_s: a clock that all processes share.
    """

    def __init__(
        self,
        descriptor: int,
        *,
        patience_s: float = _PATIENCE_S,
        on_stuck: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now_s = now_s
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, _SIZE)
        self._mutex = FileMutex(descriptor, patience_s, on_stuck)
        self._offsets: dict[bytes, int] = {}
        with self._mutex:
            self._begin()
            self._slot = self._take_slot()

    def close(self) -> None:
        """Give back what this process has open; closing the file gives back its slot."""
        with self._mutex:
            self._clear_column(self._slot)
        self._map.close()

    def account(self, digest: bytes) -> Account:
        """The account of a key; use it at once, in a ``with`` that waits for nothing.

        Raises:
            NoCapacity: more than ``MAX_KEYS`` keys were used within an hour.
        """
        self._mutex.__enter__()
        try:
            offset = self._offset_of(digest)
            return Account(self, offset, _LEVELS.unpack_from(self._map, offset + _DIGEST))
        except BaseException:
            self._mutex.__exit__()
            raise

    def store(self, offset: int, requests: Bucket, tokens: Bucket) -> None:
        """Keep an account's levels and let others at it."""
        _LEVELS.pack_into(
            self._map, offset + _DIGEST, requests.level, requests.at_s, tokens.level, tokens.at_s
        )
        self._mutex.__exit__()

    # --- counts of open requests, under the mutex ----------------------------------------------

    def num_open(self, offset: int) -> int:
        """The sum of a record's counts."""
        return sum(self._counts(offset))

    def without_dead(self, offset: int) -> int:
        """The same, after the counts of processes that are no more were set to zero."""
        for slot, count in enumerate(self._counts(offset)):
            if count and not self._lives(slot):
                _COUNT.pack_into(self._map, _count_at(offset, slot), 0)
        return self.num_open(offset)

    def add_open(self, offset: int, change: int) -> None:
        """Change this process's count."""
        at = _count_at(offset, self._slot)
        count: int = _COUNT.unpack_from(self._map, at)[0] + change
        assert count >= 0, "what is closed was open"
        _COUNT.pack_into(self._map, at, count)

    def _counts(self, offset: int) -> tuple[int, ...]:
        num_slots = _COUNT.unpack_from(self._map, _SLOTS_AT)[0]
        return struct.unpack_from(f"<{num_slots}I", self._map, offset + _COUNTS)

    def _lives(self, slot: int) -> bool:
        return slot == self._slot or is_locked_elsewhere(self._descriptor, slot)

    # --- records ------------------------------------------------------------------------------

    def _offset_of(self, digest: bytes) -> int:
        offset = self._offsets.get(digest)
        if offset is None or self._map[offset : offset + _DIGEST] != digest:
            offset = self._offsets[digest] = self._find(digest) or self._assign(digest)
        return offset

    def _find(self, digest: bytes) -> int | None:
        at = self._map.find(digest, _PAGE)
        while at >= 0 and (at - _PAGE) % _RECORD:
            at = self._map.find(digest, at + 1)
        return at if at >= 0 else None

    def _assign(self, digest: bytes) -> int:
        """Take a free record, else the one that was idle for longest."""
        oldest_s, oldest = self.now_s() - _IDLE_S, 0
        for offset in _offsets():
            if self._map[offset : offset + _DIGEST] == _FREE:
                oldest = offset
                break
            _, requests_s, _, tokens_s = _LEVELS.unpack_from(self._map, offset + _DIGEST)
            used_s = max(requests_s, tokens_s)
            if used_s < oldest_s and not self.without_dead(offset):
                oldest_s, oldest = used_s, offset
        if not oldest:
            raise NoCapacity(f"over {MAX_KEYS} API keys were used within an hour")
        self._map[oldest : oldest + _RECORD] = digest + bytes(_RECORD - _DIGEST)
        return oldest

    # --- the file -----------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget what another boot of the machine has written: its clock was another one."""
        stamp = _MAGIC + _BOOT.read_bytes().strip()
        if self._map[: len(stamp)] != stamp:
            self._map[:] = stamp + bytes(_SIZE - len(stamp))

    def _take_slot(self) -> int:
        for slot in range(NUM_SLOTS):
            if lock_byte(self._descriptor, slot):
                taken = max(slot + 1, _COUNT.unpack_from(self._map, _SLOTS_AT)[0])
                _COUNT.pack_into(self._map, _SLOTS_AT, taken)
                self._clear_column(slot)
                return slot
        raise ConfigError(f"over {NUM_SLOTS} bridges share this data directory", param="mesh.data")

    def _clear_column(self, slot: int) -> None:
        for offset in _offsets():
            if self._map[offset : offset + _DIGEST] == _FREE:
                return  # records are filled from the first on
            _COUNT.pack_into(self._map, _count_at(offset, slot), 0)


def _offsets() -> range:
    return range(_PAGE, _SIZE, _RECORD)


def _count_at(offset: int, slot: int) -> int:
    return offset + _COUNTS + slot * _COUNT.size


@contextlib.contextmanager
def open_budgets(
    data: Path,
    *,
    patience_s: float = _PATIENCE_S,
    on_stuck: Callable[[], None] = lambda: None,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[Budgets]:
    """The budgets in ``data``, made when missing, for this process while the block runs.

    Raises:
        ConfigError: the file can't be made or used.
    """
    path = data / FILE
    try:
        data.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"can't use {path}: {error.strerror}", param="mesh.data") from error
    try:
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # writes to the map find their room
            budgets = Budgets(descriptor, patience_s=patience_s, on_stuck=on_stuck, now_s=now_s)
        except OSError as error:
            raise ConfigError(f"can't use {path}: {error.strerror}", param="mesh.data") from error
        try:
            yield budgets
        finally:
            budgets.close()
    finally:
        os.close(descriptor)
