"""Which cached slot goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

_PROTECTED_SHARE = 0.8  # of all cached slots, the most that those used again may be
_NUM_LOOKED_AT = 8  # how far from the oldest one a slot may be that goes in its place


class CachedBlocks:
    """Slots to which nobody refers, but which can be found.

    Recency and frequency together, as a segmented LRU: slots that were never used again go before
    those that were, in each segment the one that was left alone longest; the second segment is
    bounded, so that what was popular once goes in the end. Each call is O(1): the engine's thread
    makes them.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", IEEE
    Computer 27(3), 1994.
    """

    def __init__(self) -> None:
        # Oldest first. A dict keeps the order of insertion, too, but to find its first key it walks
        # over all that were taken from there since it last grew.
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[int]:
        yield from self._once
        yield from self._again

    def add(self, block: int, *, is_reused: bool) -> None:
        """Nobody refers to it any more."""
        (self._again if is_reused else self._once)[block] = None

    def remove(self, block: int) -> None:
        """Somebody refers to it again."""
        if block in self._once:
            del self._once[block]
        else:
            del self._again[block]

    def pop_victim(self, is_spare: Callable[[int], bool] | None) -> int:
        """Take out the slot that goes first; there must be one.

        Args:
            is_spare: whether a lower tier has its content as well: of the oldest few, such a slot
                goes first. None: there is no lower tier.
        """
        num_once, num_again = len(self._once), len(self._again)
        is_full = num_again > _PROTECTED_SHARE * (num_once + num_again)
        line = self._again if is_full or not num_once else self._once
        victim = next(iter(line))
        if is_spare is not None and not is_spare(victim):
            victim = next(filter(is_spare, islice(line, 1, _NUM_LOOKED_AT)), victim)
        del line[victim]
        return victim
