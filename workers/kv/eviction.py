"""Which blocks go first when a tier is full: those used least recently and least often.

Two policies behind :class:`workers.kv.api.EvictionPolicy`; both are pure, and both let a block's
children go before it, since no block is of use without its parents.

    LrfuPolicy   the one we use
    LruPolicy    what it is measured against: ``mesh bench kv``, section eviction

A block's worth is one number, on a clock that ticks with every use. Each use is worth 1 when it
happens and half as much ``HALF_LIFE`` later, and the worth of a block is the sum over its uses.
Since all of them fade alike, their order changes only when one is used: instead of the sum we keep
its logarithm with the clock added, which stays as it is until the next use.

    worth after a use = now + log2(1 + 2 ** (worth before - now))

Source: Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least
Frequently Used Policies", IEEE Transactions on Computers 50(12), 2001. Taken because one number per
block orders any set of candidates. Queue policies (S3-FIFO, 2Q, ARC, W-TinyLFU) say which block is
next in their queues, but the next one here must also be a leaf of the prefix tree and unpinned.
They need ghosts to tell a second use from a scan; so do we, and remember the worth of as many
evicted blocks as the tier has blocks.

Cost: a use is a dictionary look-up and a logarithm, a victim some heap operations; 16 bytes of hash
and one float per ghost, beside what Python adds.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection
from enum import Enum, auto

from workers.kv.api import BlockName

HALF_LIFE = 2.0  # in uses per block of the tier; see ``loadgen/bench/kv_eviction.py``
MAX_SHARE = 0.1  # of what can be evicted, in one cycle
_MAX_DEAD = 64  # heap entries of blocks that are gone, beside as many as there are blocks


class _Place(Enum):
    HEAP = auto()
    PARKED = auto()  # it had children when its turn came; back when the last one goes
    OFFERED = auto()  # a victim, until it is removed or the next cycle begins
    GONE = auto()


class _Node:
    __slots__ = ("block", "number", "place", "worth")

    def __init__(self, block: BlockName, number: int, worth: float) -> None:
        self.block = block
        self.number = number  # by age; decides between equals
        self.worth = worth
        self.place = _Place.HEAP


class _ByWorth(ABC):
    """Blocks in a heap by a worth that only grows: the heap hears of a use when the block comes to
    its top.

    Args:
        max_share: the most that one cycle gives, as a share of the blocks that are not pinned (one
            block at least).
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._nodes: dict[bytes, _Node] = {}
        self._num_children: dict[bytes, int] = {}  # by parent, here or not; without offered ones
        self._heap: list[tuple[float, int, _Node]] = []
        self._num_dead = 0  # entries of the heap
        self._offered: list[_Node] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @abstractmethod
    def _first_worth(self, block_hash: bytes) -> float:
        """Of a block that comes."""

    @abstractmethod
    def _next_worth(self, worth: float) -> float:
        """Of a block with ``worth`` after one more use."""

    # ---- what happens in the tier ----------------------------------------------------------

    def added(self, block: BlockName) -> None:
        """See :class:`workers.kv.api.EvictionPolicy`."""
        if block.block_hash in self._nodes:
            self.used(block.block_hash)
            return
        self._num_added += 1
        node = _Node(block, self._num_added, self._first_worth(block.block_hash))
        self._nodes[block.block_hash] = node
        self._num_children[block.parent] = self._num_children.get(block.parent, 0) + 1
        self._push(node)

    def used(self, block_hash: bytes) -> None:
        """See :class:`workers.kv.api.EvictionPolicy`."""
        node = self._nodes.get(block_hash)
        if node is not None:
            node.worth = self._next_worth(node.worth)

    def removed(self, block_hash: bytes) -> None:
        """See :class:`workers.kv.api.EvictionPolicy`."""
        node = self._nodes.pop(block_hash, None)
        if node is None:
            return
        if node.place is not _Place.OFFERED:
            self._leave_parent(node)
        if node.place is _Place.HEAP:
            self._num_dead += 1
        node.place = _Place.GONE
        if self._num_dead > len(self._nodes) + _MAX_DEAD:
            self._heap = [entry for entry in self._heap if entry[2].place is _Place.HEAP]
            heapq.heapify(self._heap)
            self._num_dead = 0

    # ---- the decision ----------------------------------------------------------------------

    def victims(
        self,
        count: int,
        pinned: Collection[bytes] = frozenset(),
        prefer: Callable[[bytes], bool] | None = None,
    ) -> list[bytes]:
        """See :class:`workers.kv.api.EvictionPolicy`."""
        self._take_back_offered()
        share = int(self._max_share * (len(self._nodes) - len(pinned)))
        count = min(count, max(1, share))
        while len(self._offered) < count and self._offer_some(count, pinned, prefer):
            pass  # their parents may be leaves now
        return [node.block.block_hash for node in self._offered]

    def _offer_some(
        self, count: int, pinned: Collection[bytes], prefer: Callable[[bytes], bool] | None
    ) -> bool:
        """Offer leaves until there are ``count``, of the next so many the preferred ones first;
        whether any was found."""
        num_before = len(self._offered)
        passed: list[_Node] = []  # can go, but are not preferred
        kept: list[_Node] = []
        while len(self._offered) < count and len(passed) < count:
            node = self._pop_leaf()
            if node is None:
                break
            if node.block.block_hash in pinned:
                kept.append(node)
            elif prefer is None or prefer(node.block.block_hash):
                self._offer(node)
            else:
                passed.append(node)
        num_more = count - len(self._offered)
        for node in passed[:num_more]:
            self._offer(node)
        for node in (*kept, *passed[num_more:]):
            self._push(node)
        return len(self._offered) > num_before

    def _offer(self, node: _Node) -> None:
        node.place = _Place.OFFERED
        self._offered.append(node)
        self._leave_parent(node)

    def _take_back_offered(self) -> None:
        offered, self._offered = self._offered, []
        for node in offered:
            if node.place is _Place.OFFERED:
                parent = node.block.parent
                self._num_children[parent] = self._num_children.get(parent, 0) + 1
                self._push(node)

    def _leave_parent(self, node: _Node) -> None:
        name = node.block.parent
        left = self._num_children.pop(name) - 1
        if left:
            self._num_children[name] = left
            return
        parent = self._nodes.get(name)
        if parent is not None and parent.place is _Place.PARKED:
            self._push(parent)

    def _push(self, node: _Node) -> None:
        node.place = _Place.HEAP
        heapq.heappush(self._heap, (node.worth, node.number, node))

    def _pop_leaf(self) -> _Node | None:
        """The block of least worth without children, out of the heap."""
        heap = self._heap
        while heap:
            worth, number, node = heap[0]
            if node.place is _Place.GONE:
                heapq.heappop(heap)
                self._num_dead -= 1
            elif node.worth > worth:
                heapq.heapreplace(heap, (node.worth, number, node))
            elif node.block.block_hash in self._num_children:
                heapq.heappop(heap)
                node.place = _Place.PARKED
            else:
                heapq.heappop(heap)
                return node
        return None

    def check_invariants(self) -> None:
        """Raise AssertionError when a block could be lost, or go before its children."""
        in_heap = [node for _, _, node in self._heap if node.place is _Place.HEAP]
        assert len(in_heap) == len(set(map(id, in_heap))), "a block is in the heap twice"
        assert len(self._heap) - len(in_heap) == self._num_dead, "dead entries are miscounted"
        places = dict.fromkeys(_Place, 0)
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            places[node.place] += 1
            if node.place is not _Place.OFFERED:
                children[node.block.parent] = children.get(node.block.parent, 0) + 1
            if node.place is _Place.PARKED:
                assert node.block.block_hash in self._num_children, "a leaf is parked"
        assert places[_Place.GONE] == 0, "a block that is gone is known"
        assert places[_Place.HEAP] == len(in_heap), "a block is neither in the heap nor beside it"
        assert places[_Place.OFFERED] == sum(
            node.place is _Place.OFFERED for node in self._offered
        ), "a victim was forgotten"
        assert children == self._num_children, "children are miscounted"
        assert all(w <= node.worth for w, _, node in self._heap), "a block lost worth"


class LrfuPolicy(_ByWorth):
    """By recency and frequency together; see the module.

    Args:
        max_share: of the blocks that are not pinned, the most that one cycle gives.
        half_life: how long until a use counts half, in uses per block of the tier. Towards 0 this
            is LRU, towards infinity LFU.
    """

    def __init__(self, *, max_share: float = MAX_SHARE, half_life: float = HALF_LIFE) -> None:
        super().__init__(max_share)
        self._half_life = half_life
        self._now = 0.0  # in half-lives
        # Worth of blocks that have gone, oldest first. To find its first key, a dict walks over all
        # that were taken from there since it last grew.
        self._ghosts: OrderedDict[bytes, float] = OrderedDict()

    @property
    def num_ghosts(self) -> int:
        """Blocks that have gone and whose worth is remembered."""
        return len(self._ghosts)

    def removed(self, block_hash: bytes) -> None:
        """See :class:`workers.kv.api.EvictionPolicy`."""
        node = self._nodes.get(block_hash)
        super().removed(block_hash)
        if node is not None:
            self._ghosts[block_hash] = node.worth
        while len(self._ghosts) > len(self._nodes) + 1:
            self._ghosts.popitem(last=False)

    def _first_worth(self, block_hash: bytes) -> float:
        ghost = self._ghosts.pop(block_hash, None)
        if ghost is not None:
            return self._next_worth(ghost)
        self._tick()
        return self._now

    def _next_worth(self, worth: float) -> float:
        self._tick()
        return self._now + math.log2(1.0 + 2.0 ** (worth - self._now))

    def _tick(self) -> None:
        self._now += 1.0 / (self._half_life * max(1, len(self._nodes)))

    def check_invariants(self) -> None:
        """As for every policy; and ghosts are of blocks that have gone."""
        super().check_invariants()
        assert not self._ghosts.keys() & self._nodes.keys(), "a ghost lives"


class LruPolicy(_ByWorth):
    """Least recently used first."""

    def __init__(self, *, max_share: float = MAX_SHARE) -> None:
        super().__init__(max_share)
        self._now = 0.0

    def _first_worth(self, block_hash: bytes) -> float:
        return self._next_worth(0.0)

    def _next_worth(self, worth: float) -> float:
        self._now += 1.0
        return self._now
