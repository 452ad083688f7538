"""Moving blocks between the host tier and the disk, on threads of its own.

    saves   one thread: what the host tier commits is written behind, at a bounded rate; the queue
            holds names, and what finds no room there is never saved
    loads   two threads: what a request will need is read into the host tier

A disk may hang for as long as it likes. Nothing waits for these threads: a load ends for its caller
with its time-out, slots are committed or given back by the thread that fills them, and a process
that ends leaves threads behind that hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from infra.log import Logger
from workers.kv.api import BlockName, Filling, HostTier
from workers.kv.disk_tier import DirectoryTier
from workers.kv.tally import TierTally

WRITE_BYTES_S = 256 << 20  # a tenth of what a core copies; an NVMe writes several times as much
_BURST_S = 0.1  # of writing that may be made up for
_MAX_SAVES = 4096  # names that wait
_MAX_LOADS = 64  # requests that wait
_NUM_LOADERS = 2
_BATCH = 8  # blocks between two looks at the clock
_OPEN_RETRY_S = 2.0
_FLUSH_S = 2.0  # at the end, for what is not saved yet
_ASSUMED_BYTES_S = 500e6  # an NVMe or the page cache, until measured
_MEASURED_FOR_S = 60.0  # after so long without reading a disk may be faster again
_NEWEST_SHARE = 0.3  # of the last batch in the measured speed


@dataclass(slots=True, kw_only=True)
class _Load:
    blocks: tuple[BlockName, ...]
    until_s: float  # monotonic
    num_loaded: int = 0
    done: Future[int] = field(default_factory=Future)


class ReadSpeed:
    """How fast the disk gave blocks lately."""

    def __init__(self) -> None:
        self._bytes_s = _ASSUMED_BYTES_S
        self._measured_s = 0.0  # monotonic

    def measured(self, num_bytes: int, took_s: float, now_s: float) -> None:
        """So many bytes were read."""
        newest = num_bytes / max(took_s, 1e-6)
        is_old = now_s - self._measured_s > _MEASURED_FOR_S
        share = 1.0 if is_old else _NEWEST_SHARE
        self._bytes_s += share * (newest - self._bytes_s)
        self._measured_s = now_s

    def bytes_s(self, now_s: float) -> float:
        """Bytes per second, checksums included; what is old is not believed."""
        is_old = now_s - self._measured_s > _MEASURED_FOR_S
        return max(self._bytes_s, _ASSUMED_BYTES_S) if is_old else self._bytes_s


class DiskMover:
    """Feeds the disk from the host tier, and the host tier from the disk.

    Attributes:
        tier: what is on the disk.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DirectoryTier,
        tally: TierTally,
        log: Logger,
        *,
        write_bytes_s: float = WRITE_BYTES_S,
    ) -> None:
        self.tier = disk
        self._host = host
        self._tally = tally
        self._log = log
        self._write_bytes_s = write_bytes_s
        self._saves: queue.Queue[BlockName | None] = queue.Queue(_MAX_SAVES)
        self._loads: queue.Queue[_Load | None] = queue.Queue(_MAX_LOADS + _NUM_LOADERS)
        self._speed = ReadSpeed()
        self._closing = threading.Event()
        self._flush_until_s = 0.0
        self._due_s = 0.0  # when the next save may begin
        self._saver = threading.Thread(target=self._save_all, name="kv-disk-save", daemon=True)
        self._loaders = [
            threading.Thread(target=self._load_all, name=f"kv-disk-load-{n}", daemon=True)
            for n in range(_NUM_LOADERS)
        ]

    def start(self) -> None:
        """Take the directory over, in the background, and begin."""
        for thread in (self._saver, *self._loaders):
            thread.start()

    def close(self) -> None:
        """Save what waits, for two seconds at most, and end; then nothing touches the host tier any
        more, unless the disk hangs. The directory is free for others."""
        self._flush_until_s = time.monotonic() + _FLUSH_S
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then it does not wait, and looks at the clock
            self._saves.put_nowait(None)
        for _ in self._loaders:
            self._loads.put(None)
        ends_s = self._flush_until_s + _FLUSH_S
        threads = [self._saver, *self._loaders]
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._log.warning("kv_disk_hangs")  # the lock goes with the process
        else:
            self.tier.close()

    # ---- host -> disk ----------------------------------------------------------------------

    def enqueue(self, blocks: Sequence[BlockName]) -> None:
        """Blocks of the host tier wait to be saved from now on, as far as there is room in line.
        Waits for nothing."""
        for block in blocks:
            if self.tier.has(block.block_hash):
                continue
            try:
                self._saves.put_nowait(block)
            except queue.Full:
                self._tally.add("disk", "dropped")

    def _save_all(self) -> None:
        while not self.tier.open():
            if self._closing.wait(_OPEN_RETRY_S):
                return
        while (block := self._next_save()) is not None:
            try:
                self._save(block)
            except Exception:
                self._log.error("kv_disk_save_failed", exc_info=True)

    def _next_save(self) -> BlockName | None:
        """Waits for one, before the end; None ends the thread."""
        if not self._closing.is_set():
            return self._saves.get()
        if time.monotonic() >= self._flush_until_s:
            return None
        try:
            return self._saves.get_nowait()
        except queue.Empty:
            return None

    def _save(self, block: BlockName) -> None:
        if self.tier.has(block.block_hash):
            return
        pin = self._host.pin([block.block_hash])
        try:
            if not pin.slots:
                self._tally.add("disk", "dropped")  # evicted before its turn
                return
            data = memoryview(self._host.memory.slots[pin.slots[0]])
            self.tier.save(block, data, pin.checksums[0])
        finally:
            self._host.unpin(pin)
        self._pace(self._host.memory.block_bytes)

    def _pace(self, num_bytes: int) -> None:
        now_s = time.monotonic()
        self._due_s = max(self._due_s, now_s - _BURST_S) + num_bytes / self._write_bytes_s
        if self._due_s > now_s:
            self._closing.wait(self._due_s - now_s)

    # ---- disk -> host ----------------------------------------------------------------------

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes`` the disk has, and can be read now. Waits for nothing."""
        return self.tier.num_leading(hashes)

    def read_s(self, num_blocks: int) -> float:
        """Seconds that reading so many blocks will take, as things are: measured lately, or assumed
        when nothing was read for a minute. Without what waits in line."""
        speed = self._speed.bytes_s(time.monotonic())
        return num_blocks * self._host.memory.block_bytes / speed

    async def load(self, blocks: Sequence[BlockName], timeout_s: float) -> int:
        """Bring blocks into the host tier, of the first ones, without a gap, as many as the disk
        has and there is room for. What the host tier has already is passed over.

        Returns:
            How many were brought. After ``timeout_s`` those that were brought until then; a batch
            that is being read then still arrives.
        """
        if self._closing.is_set() or self._loads.qsize() >= _MAX_LOADS:
            return 0
        load = _Load(blocks=tuple(blocks), until_s=time.monotonic() + timeout_s)
        self._loads.put_nowait(load)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(load.done)
        except TimeoutError:
            return load.num_loaded
        finally:
            load.until_s = 0.0

    def _load_all(self) -> None:
        while (load := self._loads.get()) is not None:
            if not load.done.set_running_or_notify_cancel():
                continue
            try:
                self._load(load)
            except Exception as error:
                self._log.error("kv_disk_load_failed", reason=repr(error))
                load.done.set_exception(error)
            else:
                load.done.set_result(load.num_loaded)

    def _load(self, load: _Load) -> None:
        hashes = [block.block_hash for block in load.blocks]
        first = self._host.num_leading(hashes)
        end = first + self.tier.num_leading(hashes[first:])
        for start in range(first, end, _BATCH):
            if self._closing.is_set() or time.monotonic() >= load.until_s:
                return
            num_brought, is_whole = self._bring(load.blocks[start : min(end, start + _BATCH)])
            load.num_loaded += num_brought
            if not is_whole:
                return

    def _bring(self, blocks: Sequence[BlockName]) -> tuple[int, bool]:
        """How many were read, and whether all of ``blocks`` are in the host tier now."""
        filling = self._host.reserve(blocks)
        checksums: list[int] = []
        started_s = time.monotonic()
        try:
            checksums = self.tier.load(filling.blocks, self._host.memory, filling.slots)
        finally:
            self._settle(filling, checksums)
        if checksums:
            now_s = time.monotonic()
            num_bytes = len(checksums) * self._host.memory.block_bytes
            self._speed.measured(num_bytes, now_s - started_s, now_s)
        hashes = [block.block_hash for block in blocks]
        return len(checksums), self._host.num_leading(hashes) == len(hashes)

    def _settle(self, filling: Filling, checksums: Sequence[int]) -> None:
        """The first slots hold what they should, the others nothing."""
        num_right, num_slots = len(checksums), len(filling.slots)
        self._host.commit(filling.part(range(num_right)), checksums)
        self._host.abort(filling.part(range(num_right, num_slots)))
