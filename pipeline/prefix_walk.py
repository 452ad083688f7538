"""One way down a prompt: who holds its first blocks, how far, and in which tier.

Holders of a block are the bits of one number, ``BITS`` for each place of a worker, in the order of
``TIERS``; see ``pipeline/radix_index.py``. What was found stays in that form: of a beginning that
hundreds of workers hold, few are ever asked for by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.kv_events import KvTier

TIERS: tuple[KvTier, ...] = ("device", "host", "disk")
BITS = len(TIERS)


class Match(msgspec.Struct, frozen=True):
    """How many of the first blocks of a prompt a worker holds, without a gap.

    ``num_device`` of them lie in device memory from the first on, ``num_memory`` in device or host
    memory; ``num_device <= num_memory <= num_blocks``.
    """

    worker: str
    num_blocks: int
    num_memory: int
    num_device: int

    @property
    def tier(self) -> KvTier:
        """The slowest tier that has to be read for all of them."""
        if self.num_device == self.num_blocks:
            return "device"
        return "host" if self.num_memory == self.num_blocks else "disk"


class Roll:
    """Which worker has which place; never changes, so that what was found stays true to it."""

    __slots__ = ("places", "workers")

    def __init__(self, workers: Iterable[str | None]) -> None:
        self.workers = tuple(workers)
        self.places = {one: place for place, one in enumerate(self.workers) if one is not None}

    def bits(self, workers: Iterable[str]) -> int:
        """Of ``workers`` that have a place, in every tier."""
        places = (self.places.get(worker) for worker in workers)
        return sum(_ALL << BITS * place for place in places if place is not None)


class _End(NamedTuple):
    """Whose blocks end behind ``number`` of them: in any tier, in memory, on the device. The first
    bit of each place."""

    number: int
    far: int
    memory: int
    device: int


class Found(Mapping[str, Match]):
    """Who holds the first block of a prompt, and how far, by worker id."""

    __slots__ = ("_ends", "roll")

    def __init__(self, roll: Roll, ends: Sequence[_End]) -> None:
        self.roll = roll
        self._ends = ends

    def __len__(self) -> int:
        return sum(end.far.bit_count() for end in self._ends)

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(name for end in self._ends for name in self._names(end.far)))

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, str) and self._match(worker) is not None

    def __getitem__(self, worker: str) -> Match:
        match = self._match(worker)
        if match is None:
            raise KeyError(worker)
        return match

    @property
    def most(self) -> int:
        """Blocks that somebody holds."""
        return max((end.number for end in self._ends if end.far), default=0)

    def furthest(self, more_than: int) -> Iterator[tuple[int, KvTier, list[str]]]:
        """Those who hold more than so many blocks, in groups of equally many and of the same
        slowest tier: the most first, of equals the fastest."""
        ends = [end for end in self._ends if end.far and end.number > more_than]
        for end in sorted(ends, key=lambda end: -end.number):
            left = end.far
            for tier, plane in zip(TIERS, (end.device, end.memory, end.far), strict=True):
                if plane & left:
                    yield end.number, tier, self._names(plane & left)
                left &= ~plane

    def worth(self, disk_share: float) -> npt.NDArray[np.float64]:
        """[1 + num_places of the roll]: blocks that each one holds; of those on a disk this share.
        The last one is 0: of whoever has no place.

        Cost: 8 µs, whoever and however many they are.
        """
        num_bits = BITS * (1 + len(self.roll.workers))
        numbers = [float(end.number) for end in self._ends]
        planes = [end.far for end in self._ends]
        if planes != (memory := [end.memory for end in self._ends]):
            planes += memory
            numbers = [share * num for share in (disk_share, 1 - disk_share) for num in numbers]
        size = -(-num_bits // 8)
        packed = b"".join([plane.to_bytes(size, "little") for plane in planes])
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        firsts = bits.reshape(len(planes), 8 * size)[:, :num_bits:BITS]
        held = np.array(numbers).dot(firsts.astype(np.float64))
        return held  # type: ignore[no-any-return]

    def joined(self, other: Found) -> Found:
        """Both; nobody is in both of them, and the roll is the same."""
        return Found(self.roll, [*self._ends, *other._ends]) if self._ends else other

    def _match(self, worker: str) -> Match | None:
        place = self.roll.places.get(worker)
        if place is None:
            return None
        bit, far, memory, device = 1 << BITS * place, 0, 0, 0
        for end in self._ends:
            far += end.number if end.far & bit else 0
            memory += end.number if end.memory & bit else 0
            device += end.number if end.device & bit else 0
        return Match(worker, far, memory, device) if far else None

    def _names(self, plane: int) -> list[str]:
        workers = self.roll.workers
        names = [workers[place] for place in _places(plane)]
        assert None not in names, "bits of a worker that left"
        return names  # type: ignore[return-value]


NOBODY: Final = Found(Roll(()), ())


class Walk:
    """One way down a prompt: who is still with us, in device memory, in memory, in any tier."""

    __slots__ = ("_device", "_ends", "_far", "_has_begun", "_memory")

    def __init__(self) -> None:
        self._has_begun = False
        self._far = self._memory = self._device = 0  # the first bit of each place
        self._ends: list[_End] = []

    def go_on(self, bits: int, number: int) -> bool:
        """Take the holders of block ``number``; whether anybody is left."""
        firsts = _firsts(-(-bits.bit_length() // BITS))
        device = bits & firsts
        memory = device | (bits >> 1 & firsts)
        far = memory | (bits >> 2 & firsts)
        if self._has_begun:
            self._note(self._far & ~far, self._memory & ~memory, self._device & ~device, number)
            far, memory, device = self._far & far, self._memory & memory, self._device & device
        self._has_begun = True
        self._far, self._memory, self._device = far, memory, device
        return far != 0

    def end(self, number: int, roll: Roll) -> Found:
        """Whoever is still there came as far as ``number`` blocks: all that was found.

        Args:
            roll: whose the places are.
        """
        self._note(self._far, self._memory, self._device, number)
        return Found(roll, self._ends)

    def _note(self, far: int, memory: int, device: int, number: int) -> None:
        if far or memory or device:
            self._ends.append(_End(number, far, memory, device))


_ALL: Final = (1 << BITS) - 1
_MANY: Final = 6  # looking for the next bit takes as long as looking at so many


def _places(plane: int) -> list[int]:
    """The places whose first bit is set. A text of the bits is faster to go through than a number:
    with 256 places 8 µs instead of 100, with a few of so many 2."""
    bits = bin(plane)[:1:-1][::BITS]
    num = plane.bit_count()
    if _MANY * num > len(bits):
        return [place for place, bit in enumerate(bits) if bit == "1"]
    found, at = [], -1
    for _ in range(num):
        at = bits.index("1", at + 1)
        found.append(at)
    return found


@lru_cache(4096)
def _firsts(num_places: int) -> int:
    """The first bit of so many places: 0b...001001001."""
    return ((1 << BITS * num_places) - 1) // ((1 << BITS) - 1)
