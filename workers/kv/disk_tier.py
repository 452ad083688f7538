"""L3: blocks in a directory that survives the worker.

    <kv_disk>/<worker name>/lock              held by the process that uses the directory
    <kv_disk>/<worker name>/<fingerprint>/    the blocks of this layout, see ``store``

The books are in memory, under a lock that is never held while the disk works. A disk that is full,
fails or is slow gets a rest: nothing is written, or nothing read, and blocks are computed instead.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from infra.file_locks import lock_byte
from infra.log import Logger
from infra.metrics import Metrics
from infra.transport.shm import SharedPool
from workers.kv.api import BlockEvents, BlockName, EvictionPolicy
from workers.kv.disk_books import DiskBooks
from workers.kv.rest import Rest
from workers.kv.store import BlockStore, delete_blocks
from workers.kv.tally import TierTally

SLOW_S = 2.0  # for one block; a disk under load takes some milliseconds
_AT_ONCE = 512  # found blocks that are entered under one hold of the lock
_LAYOUT = re.compile(r"[0-9a-f]{16}\Z")
P = ParamSpec("P")
R = TypeVar("R")


class DirectoryTier:
    """The :class:`workers.kv.api.DiskTier` of one worker. Thread-safe. It has nothing until
    ``open`` has returned True.

    Args:
        root: the directory of this worker's name; the store's own is in it.
        quota_bytes: for all files together, at every moment.
        now: seconds, monotonic.
        slow_s: a block that takes longer gives the disk a rest.
    """

    def __init__(
        self,
        root: Path,
        store: BlockStore,
        quota_bytes: int,
        *,
        policy: EvictionPolicy,
        events: BlockEvents | None,
        tally: TierTally,
        log: Logger,
        now: Callable[[], float] = time.monotonic,
        slow_s: float = SLOW_S,
    ) -> None:
        self._root = root
        self._store = store
        self._books = DiskBooks(quota_bytes // store.file_bytes, policy, events)
        self._tally = tally
        self._log = log
        self._now = now
        self._slow_s = slow_s
        self._opens = Rest("opening", log, now)
        self._reads = Rest("reading", log, now)
        self._writes = Rest("writing", log, now)
        self._lock = threading.Lock()
        self._descriptor = -1  # of the file ``lock``

    # ---- what it has -----------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._books)

    @property
    def used_bytes(self) -> int:
        """What all its files take, also those that are being written or deleted."""
        return self._books.num_files * self._store.file_bytes

    def has(self, block_hash: bytes) -> bool:
        """Whether a block is here. Waits for nothing; counts as no use."""
        return self._books.has(block_hash)

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """See :class:`workers.kv.api.DiskTier`; 0 while reading rests. Waits for nothing."""
        return 0 if self._reads.is_on else self._books.num_leading(hashes)

    def note_use(self, block_hash: bytes) -> None:
        """A block, if it is here, was of use to a tier above until now."""
        self._locked(self._books.note_use, block_hash)

    def show(self, metrics: Metrics) -> None:
        """Set the gauges of this tier."""
        num_kept, num_files = len(self._books), self._books.num_files
        metrics.kv_blocks.labels("disk", "cached").set(num_kept)
        metrics.kv_blocks.labels("disk", "moving").set(num_files - num_kept)
        metrics.kv_blocks.labels("disk", "free").set(self._books.max_files - num_files)
        metrics.kv_disk_bytes.set(self.used_bytes)

    # ---- taking it over --------------------------------------------------------------------

    def open(self) -> bool:
        """Take the directory over and enter what is there in the books; whether we have it. False
        when another process uses it, or the disk fails: to be called again later.

        Blocks of other layouts are deleted.
        """
        if self._descriptor >= 0:
            return True
        descriptor = -1
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not lock_byte(descriptor, 0):
                self._opens.failed("another process of this name uses the directory")
                return False
            self._read_back()
            self._descriptor, descriptor = descriptor, -1
        except OSError as error:
            self._opens.failed(_reason(error))
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        self._opens.worked()
        return True

    def close(self) -> None:
        """Let others have the directory. Nothing else is called any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_back(self) -> None:
        started_s = self._now()
        num_foreign = sum(delete_blocks(path) for path in self._foreign())
        found, num_torn = self._store.scan()
        for start in range(0, len(found), _AT_ONCE):
            with self._lock:
                for stored in found[start : start + _AT_ONCE]:
                    self._books.kept(stored.block)
        self._make_room(0)  # the quota may have been larger
        self._tally.add("disk", "dropped", num_foreign)
        self._tally.add("disk", "corrupt", num_torn)
        self._log.info(
            "kv_disk_read_back",
            num_blocks=self.num_blocks,
            num_foreign=num_foreign,
            num_torn=num_torn,
            took_s=round(self._now() - started_s, 3),
        )

    def _foreign(self) -> list[Path]:
        here = self._store.directory.name
        return [
            path
            for path in self._root.iterdir()
            if _LAYOUT.match(path.name) and path.name != here and not path.is_symlink()
        ]

    # ---- read ------------------------------------------------------------------------------

    def load(
        self, blocks: Sequence[BlockName], into: SharedPool, slots: Sequence[int]
    ) -> list[int]:
        """See :class:`workers.kv.api.DiskTier`."""
        checksums: list[int] = []
        for block, slot in zip(blocks, slots, strict=True):
            checksum = self._load_one(block.block_hash, memoryview(into.slots[slot]))
            if checksum is None:
                break
            checksums.append(checksum)
        return checksums

    def _load_one(self, block_hash: bytes, into: memoryview) -> int | None:
        with self._lock:
            block = None if self._reads.is_on else self._books.begin_read(block_hash)
        if block is None:
            return None
        try:
            checksum = self._read(block, into)
        finally:
            with self._lock:
                self._books.end_read(block_hash)
        if checksum is None and self._locked(self._books.drop, block):
            self._delete(block)
        return checksum

    def _read(self, block: BlockName, into: memoryview) -> int | None:
        started_s = self._now()
        try:
            checksum = self._store.read(block, into)
        except FileNotFoundError:
            self._tally.add("disk", "dropped")  # somebody needed the room
            return None
        except OSError as error:
            self._tally.add("disk", "failed")
            self._locked(self._reads.failed, _reason(error))
            return None
        if checksum is None:
            self._tally.add("disk", "corrupt")
            self._log.warning("kv_disk_block_corrupt", block=block.block_hash.hex())
            return None
        self._tally.add("disk", "promoted")
        self._took(self._reads, self._now() - started_s)
        return checksum

    # ---- write -----------------------------------------------------------------------------

    def save(self, block: BlockName, data: memoryview, checksum: int) -> bool:
        """See :class:`workers.kv.api.DiskTier`."""
        if self._books.has(block.block_hash):
            return True
        if self._descriptor < 0 or self._writes.is_on or not self._make_room(1):
            self._tally.add("disk", "dropped")
            return False
        if not self._locked(self._books.begin_write, block):
            self._tally.add("disk", "dropped")  # on its way in or out, or the room went to another
            return False
        started_s = self._now()
        try:
            self._store.write(block, data, checksum)
        except OSError as error:
            self._give_up(block, error)
            return False
        self._tally.add("disk", "stored")
        with self._lock:
            self._books.kept(block)
        self._took(self._writes, self._now() - started_s)
        return True

    def _give_up(self, block: BlockName, error: OSError) -> None:
        self._tally.add("disk", "failed")
        self._locked(self._writes.failed, _reason(error))
        is_lost = False
        try:
            self._store.discard(block)
        except OSError as left:
            is_lost = True  # counts until we are started again
            self._log.warning("kv_disk_part_left", reason=_reason(left))
        with self._lock:
            self._books.not_kept(block, is_lost=is_lost)

    def _make_room(self, num_files: int) -> bool:
        """Delete until so many more fit, cycle after cycle; False when that can't be."""
        while doomed := self._locked(self._books.make_room, num_files):
            num_deleted = sum([self._delete(block) for block in doomed])
            self._tally.add("disk", "evicted", num_deleted)
            if not num_deleted:
                return False
        with self._lock:
            return self._books.has_room(num_files)

    def _delete(self, block: BlockName) -> bool:
        is_refused = False
        try:
            self._store.delete(block)
        except OSError as error:
            is_refused = True
            self._locked(self._writes.failed, _reason(error))
        with self._lock:
            self._books.deleted(block, is_refused=is_refused)
        return not is_refused

    # ---- small things ----------------------------------------------------------------------

    def _locked(self, call: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        with self._lock:
            return call(*args, **named)

    def _took(self, rest: Rest, seconds: float) -> None:
        with self._lock:
            if seconds > self._slow_s:
                rest.failed(f"one block took {seconds:.1f} s")
            else:
                rest.worked()

    def check_invariants(self) -> None:
        """Raise AssertionError when the books contradict themselves or the quota."""
        with self._lock:
            self._books.check_invariants()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
