"""L2: full blocks in host memory, behind the engine's slots of the same shared pool.

A slot is in exactly one state::

    free     nothing of use in it
    filling  reserved for a block whose bytes are still to come
    cached   a block that can be found; pinned or not
    leaving  a block that can't be found any more, but is still pinned

Only the books are here. Whoever moves bytes reserves, writes and commits, or pins and reads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from infra.transport.shm import SharedPool
from workers.kv.api import BlockEvents, BlockName, EvictionPolicy, Filling, Pin
from workers.kv.eviction import LrfuPolicy
from workers.kv.tally import TierTally


class _Entry(msgspec.Struct, eq=False):
    block: BlockName
    slot: int
    checksum: int
    num_pins: int = 0


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Slots by state; they sum to the size of the tier."""

    free: int
    filling: int
    cached: int  # not pinned
    pinned: int


class HostPool:
    """Implements :class:`workers.kv.api.HostTier`.

    Args:
        memory: its slots from ``first_slot`` on are the tier's.
        policy: which blocks go first, and how many at once.

    Attributes:
        is_below: whether a lower tier holds a block: such blocks go first. Called under the lock.
            None: there is no lower tier.
        on_stored: told of blocks that were committed, after the lock is given back, by the thread
            that committed them.
        on_removed: told of each block that can't be found here any more. Called under the lock.
            None: nobody is.
    """

    def __init__(
        self,
        memory: SharedPool,
        first_slot: int,
        *,
        policy: EvictionPolicy | None = None,
        tally: TierTally | None = None,
        events: BlockEvents | None = None,
    ) -> None:
        self.memory = memory
        self.num_slots = memory.num_blocks - first_slot
        self.is_below: Callable[[bytes], bool] | None = None
        self.on_stored: Callable[[tuple[BlockName, ...]], None] = lambda _: None
        self.on_removed: Callable[[bytes], None] | None = None
        self._policy = LrfuPolicy() if policy is None else policy
        self._tally = TierTally() if tally is None else tally
        self._events = events
        self._next_slot = first_slot  # from here on no slot was ever used
        self._free: list[int] = []  # used before
        self._found: dict[bytes, _Entry] = {}
        self._filling: dict[bytes, int] = {}
        self._at: dict[int, _Entry] = {}  # by slot: those that are found, and those that leave
        self._pinned: Counter[bytes] = Counter()  # how many slots, of blocks here and leaving
        self._lock = threading.Lock()

    # ---- reading -------------------------------------------------------------------------

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first ``hashes``, without a gap, are here."""
        with self._lock:
            return self._num_leading(hashes)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block is here. One look at one table, so it needs no lock: the engine's thread
        asks for every block that it evicts."""
        return block_hash in self._found

    def pin(self, hashes: Sequence[bytes]) -> Pin:
        """Keep the first ``hashes`` that are here until ``unpin``; a use of each."""
        with self._lock:
            count = self._num_leading(hashes)
            entries = [self._found[block_hash] for block_hash in hashes[:count]]
            for entry in reversed(entries):  # a beginning is of use without its end
                self._pin(entry)
                self._policy.used(entry.block.block_hash)
        return Pin(
            blocks=tuple(entry.block for entry in entries),
            slots=tuple(entry.slot for entry in entries),
            checksums=tuple(entry.checksum for entry in entries),
        )

    def unpin(self, pin: Pin) -> None:
        """End a pin; once per pin."""
        with self._lock:
            for slot in pin.slots:
                entry = self._at[slot]
                assert entry.num_pins > 0, f"slot {slot} is unpinned more often than pinned"
                self._unpin(entry)
                if not entry.num_pins and self._found.get(entry.block.block_hash) is not entry:
                    self._free_slot(slot)

    # ---- filling -------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[BlockName]) -> Filling:
        """Slots for those of ``blocks`` that are new, as many as there is room for."""
        with self._lock:
            new = {block.block_hash: block for block in blocks if self._is_new(block)}
            room = self._make_room(list(new.values()))
            taken = tuple(new.values())[:room]
            slots = tuple(self._take_slot() for _ in taken)
            for block, slot in zip(taken, slots, strict=True):
                self._filling[block.block_hash] = slot
                self._policy.added(block)
        self._tally.add("host", "dropped", len(new) - len(taken))
        return Filling(blocks=taken, slots=slots)

    def commit(self, filling: Filling, checksums: Sequence[int]) -> None:
        """The bytes are written: the blocks can be found from now on.

        Raises:
            ValueError: not one checksum per slot.
        """
        if len(checksums) != len(filling.slots):
            raise ValueError(f"{len(checksums)} checksums for {len(filling.slots)} blocks")
        with self._lock:
            for block, checksum in zip(filling.blocks, checksums, strict=True):
                slot = self._filling.pop(block.block_hash)
                entry = _Entry(block, slot, checksum)
                self._found[block.block_hash] = self._at[slot] = entry
            if self._events is not None and filling.blocks:
                self._events.stored("host", *filling.blocks)
        self._tally.add("host", "stored", len(filling.blocks))
        if filling.blocks:
            self.on_stored(filling.blocks)

    def abort(self, filling: Filling) -> None:
        """The slots are free again."""
        with self._lock:
            for block in filling.blocks:
                self._policy.removed(block.block_hash)
                self._free.append(self._filling.pop(block.block_hash))

    def discard(self, block_hash: bytes) -> None:
        """A block whose bytes are wrong: nobody finds it any more."""
        with self._lock:
            is_here = block_hash in self._found
            if is_here:
                self._forget(block_hash)
                if self._events is not None:
                    self._events.removed("host", block_hash)
        self._tally.add("host", "corrupt", is_here)

    # ---- facts ---------------------------------------------------------------------------

    def counts(self) -> HostCounts:
        """Slots by state."""
        with self._lock:
            pinned = sum(self._pinned.values())
            filling, held = len(self._filling), len(self._at)
        return HostCounts(self.num_slots - filling - held, filling, held - pinned, pinned)

    def check_invariants(self) -> None:
        """Raise AssertionError when a slot is lost, in two states, or the indexes differ."""
        with self._lock:
            first = self.memory.num_blocks - self.num_slots
            used = range(first, self._next_slot)
            states = [*self._free, *self._filling.values(), *self._at]
            assert sorted(states) == list(used), "a slot is lost, or in two states"
            pinned = Counter(e.block.block_hash for e in self._at.values() if e.num_pins)
            assert pinned == self._pinned, "pins are miscounted"
            assert not self._found.keys() & self._filling.keys(), "a block is here and on its way"
            for slot, entry in self._at.items():
                assert entry.slot == slot, "an entry is at another slot"
                is_found = self._found.get(entry.block.block_hash) is entry
                assert is_found or entry.num_pins, "a block left, but its slot is not free"
            assert all(self._at.get(e.slot) is e for e in self._found.values()), "found nowhere"

    # ---- under the lock ------------------------------------------------------------------

    def _num_leading(self, hashes: Sequence[bytes]) -> int:
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._found:
                return count
        return len(hashes)

    def _is_new(self, block: BlockName) -> bool:
        return block.block_hash not in self._found and block.block_hash not in self._filling

    def _take_slot(self) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._next_slot
            self._next_slot += 1
        self.memory.touch(slot)  # whoever still reads the old content notices
        return slot

    def _make_room(self, blocks: Sequence[BlockName]) -> int:
        """Evict for ``blocks``; how many slots are free then."""
        free = len(self._free) + self.memory.num_blocks - self._next_slot
        missing = len(blocks) - free
        if missing <= 0:
            return free
        # Without their parents the new ones would be of no use.
        parents = {block.parent for block in blocks if block.parent in self._found}
        staying = self._pinned.keys() | self._filling.keys() | parents
        is_below = self.is_below
        victims = self._policy.victims(missing, staying, is_below)
        num_below = 0 if is_below is None else sum(map(is_below, victims))
        for block_hash in victims:
            self._forget(block_hash)
        if self._events is not None and victims:
            self._events.removed("host", *victims)
        self._tally.add("host", "evicted", num_below)
        self._tally.add("host", "dropped", len(victims) - num_below)
        return free + len(victims)

    def _forget(self, block_hash: bytes) -> None:
        entry = self._found.pop(block_hash)
        self._policy.removed(block_hash)
        if not entry.num_pins:
            self._free_slot(entry.slot)
        if self.on_removed is not None:
            self.on_removed(block_hash)

    def _pin(self, entry: _Entry) -> None:
        if not entry.num_pins:
            self._pinned[entry.block.block_hash] += 1
        entry.num_pins += 1

    def _unpin(self, entry: _Entry) -> None:
        entry.num_pins -= 1
        block_hash = entry.block.block_hash
        if not entry.num_pins:
            self._pinned[block_hash] -= 1
            if not self._pinned[block_hash]:
                del self._pinned[block_hash]

    def _free_slot(self, slot: int) -> None:
        del self._at[slot]
        self._free.append(slot)
