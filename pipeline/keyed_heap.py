"""A heap whose items can be moved and taken out of the middle. Pure.

``heapq`` can do neither, so the truth is a dict of item and key; an entry of the heap that
says otherwise is stale. It is skipped when it comes to the top, and once stale entries are the
most, the heap is made anew: memory stays within twice what is held.
"""

from __future__ import annotations

import heapq
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=str)
Key = TypeVar("Key", bound=Any)  # ordered; keys of one heap compare with each other

_SLACK = 64  # stale entries that are not worth the work


class KeyedHeap(Generic[Item, Key]):
    """Items by key, the least first; of equal keys the lesser item.

    Cost: amortised O(log n) for :meth:`put` and :meth:`first`, O(1) for the others.
    """

    def __init__(self) -> None:
        self._keys: dict[Item, Key] = {}
        self._heap: list[tuple[Key, Item]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: Item) -> bool:
        return item in self._keys

    def put(self, item: Item, key: Key) -> None:
        """Add ``item``, or move it to ``key``."""
        if item in self._keys and self._keys[item] == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Take ``item`` out, if it is there."""
        self._keys.pop(item, None)

    def first(self) -> Item | None:
        """The item with the least key; None when there is none."""
        while self._heap:
            key, item = self._heap[0]
            if item in self._keys and self._keys[item] == key:
                return item
            heapq.heappop(self._heap)
        return None

    def least(self) -> Key | None:
        """The least key; None when there is no item."""
        item = self.first()
        return None if item is None else self._keys[item]

    def check_invariants(self) -> None:
        """Every item stands in the heap where its key says."""
        entries = set(self._heap)
        assert all((key, item) in entries for item, key in self._keys.items())
