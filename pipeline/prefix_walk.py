"""One way down a prompt: who holds its first blocks, how far, and in which tier.

Holders of a block are the bits of one number, ``BITS`` for each place of a worker, in the order of
``TIERS``; see ``pipeline/radix_index.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from schemas.kv_events import KvTier

TIERS: tuple[KvTier, ...] = ("device", "host", "disk")
BITS = len(TIERS)


@dataclass(frozen=True, slots=True)
class Match:
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

    __slots__ = ("_ended", "_planes")

    def __init__(self) -> None:
        self._planes: list[int] | None = None  # disk or better, host or better, device
        self._ended: tuple[dict[int, int], ...] = ({}, {}, {})

    def go_on(self, bits: int, number: int) -> bool:
        """Take the holders of block ``number``; whether anybody is left."""
        firsts = _firsts(bits)
        device = bits & firsts
        memory = device | (bits >> 1 & firsts)
        planes = [memory | (bits >> 2 & firsts), memory, device]
        if self._planes is None:
            self._planes = planes
            return planes[0] != 0
        for ended, old, new in zip(self._ended, self._planes, planes, strict=True):
            for place in _places_in(old & ~new):
                ended[place] = number
        self._planes = [old & new for old, new in zip(self._planes, planes, strict=True)]
        return self._planes[0] != 0

    def end(self, number: int) -> None:
        """Whoever is still there came as far as ``number`` blocks."""
        for ended, plane in zip(self._ended, self._planes or (), strict=False):
            for place in _places_in(plane):
                ended[place] = number

    def matches(self, name: Callable[[int], str]) -> Iterator[Match]:
        """How far each one came who had the first block."""
        far, memory, device = self._ended
        for place, number in far.items():
            yield Match(name(place), number, memory.get(place, 0), device.get(place, 0))


def _firsts(bits: int) -> int:
    """The first bit of each place, as far as ``bits`` goes: 0b...001001001."""
    num_places = -(-bits.bit_length() // BITS)
    return ((1 << BITS * num_places) - 1) // ((1 << BITS) - 1)


def _places_in(plane: int) -> Iterator[int]:
    """The places whose first bit is set."""
    while plane:
        lowest = plane & -plane
        yield (lowest.bit_length() - 1) // BITS
        plane ^= lowest
