"""Least recently used first, leaves before their parents: the plainest eviction policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from workers.kv.api import BlockName

_SLACK = 64  # stale entries of the heap beyond twice the blocks before it is built anew


class LeafLru:
    """An :class:`workers.kv.api.EvictionPolicy`. Each call costs O(log n), amortized."""

    def __init__(self) -> None:
        self._now = 0
        self._last_use: dict[bytes, int] = {}
        self._parent: dict[bytes, bytes] = {}
        self._num_children: Counter[bytes] = Counter()  # of parents that aren't here, too
        self._leaves: list[tuple[int, bytes]] = []  # a heap; stale when ``_last_use`` differs

    def added(self, block: BlockName) -> None:
        """A new block, used now."""
        self._parent[block.block_hash] = block.parent
        self._num_children[block.parent] += 1
        self.used(block.block_hash)

    def used(self, block_hash: bytes) -> None:
        """Used now."""
        self._now += 1
        self._last_use[block_hash] = self._now
        self._push_if_leaf(block_hash)
        if len(self._leaves) > 2 * len(self._last_use) + _SLACK:
            self._leaves = [(at, one) for one, at in self._last_use.items() if self._is_leaf(one)]
            heapify(self._leaves)

    def removed(self, block_hash: bytes) -> None:
        """Forget it; its parent may be a leaf now."""
        del self._last_use[block_hash]
        parent = self._parent.pop(block_hash)
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._last_use:
                self._push_if_leaf(parent)

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        """The leaves that were used longest ago; parents join them once their children are in."""
        chosen: list[bytes] = []
        seen: dict[tuple[int, bytes], None] = {}  # go back: nothing is removed yet
        gone: Counter[bytes] = Counter()
        while self._leaves and len(chosen) < count:
            entry = heappop(self._leaves)
            at, block_hash = entry
            is_leaf = self._num_children.get(block_hash, 0) == gone[block_hash]
            if entry in seen or self._last_use.get(block_hash) != at or not is_leaf:
                continue
            seen[entry] = None
            if not may_evict(block_hash):
                continue
            chosen.append(block_hash)
            parent = self._parent[block_hash]
            gone[parent] += 1
            if parent in self._last_use and gone[parent] == self._num_children[parent]:
                heappush(self._leaves, (self._last_use[parent], parent))
        for entry in seen:
            heappush(self._leaves, entry)
        return chosen

    def _is_leaf(self, block_hash: bytes) -> bool:
        return block_hash not in self._num_children

    def _push_if_leaf(self, block_hash: bytes) -> None:
        if self._is_leaf(block_hash):
            heappush(self._leaves, (self._last_use[block_hash], block_hash))
