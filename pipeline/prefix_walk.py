"""One way down a prompt: who holds its first blocks, how far, and in which tier.

Holders of a block are the bits of one number, ``BITS`` for each place of a worker, in the order of
``TIERS``; see ``pipeline/radix_index.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

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


class Walk:
    """One way down a prompt: who is still with us, in device memory, in memory, in any tier."""

    __slots__ = ("_device", "_ended", "_far", "_has_begun", "_memory")

    def __init__(self) -> None:
        self._has_begun = False
        self._far = self._memory = self._device = 0  # the first bit of each place
        self._ended: tuple[dict[int, int], ...] = ({}, {}, {})  # by place: where it ended

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

    def end(self, number: int) -> None:
        """Whoever is still there came as far as ``number`` blocks."""
        self._note(self._far, self._memory, self._device, number)

    def _note(self, far: int, memory: int, device: int, number: int) -> None:
        for ended, plane in zip(self._ended, (far, memory, device), strict=True):
            if plane:
                ended.update(dict.fromkeys(_places(plane), number))

    def matches(self, name: Callable[[int], str]) -> Iterator[Match]:
        """How far each one came who had the first block."""
        far, memory, device = self._ended
        for place, number in far.items():
            yield Match(name(place), number, memory.get(place, 0), device.get(place, 0))


def _places(plane: int) -> list[int]:
    """The places whose first bit is set. A text of the bits is faster to go through than a number:
    with 256 places 8 µs instead of 100."""
    bits = bin(plane)[:1:-1][::BITS]
    return [place for place, bit in enumerate(bits) if bit == "1"]


@lru_cache(4096)
def _firsts(num_places: int) -> int:
    """The first bit of so many places: 0b...001001001."""
    return ((1 << BITS * num_places) - 1) // ((1 << BITS) - 1)
