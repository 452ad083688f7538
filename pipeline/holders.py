"""Sets of holders: which workers have a block, in which tiers. Many blocks share one. Pure.

    of any blocks   one set for all that have the same bits
    of a run        of its own, made for blocks that lie one behind the other. It may lose some of
                    them and never gets others, so while it has as many as at first it is *whole*:
                    who meets one of its blocks, and then another one, need not look in between
    of a chain      several runs, one behind the other, with the same bits, all of them whole

What the bits mean is said in ``pipeline/radix_index.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_MIN_RUN = 4  # blocks that get a set of their own: it takes 170 bytes
MAX_RUN = 64  # of blocks: who takes a part of a longer one would leave a rest that is not whole


class Chain:
    """Whole runs that lie one behind the other and have the same holders."""

    __slots__ = ("is_whole",)

    def __init__(self) -> None:
        self.is_whole = True


class Holders:
    """A set of (worker, tier), and how many blocks have it. ``run_length``: it was made for so many
    that lie one behind the other, up to ``last``; 0: for any."""

    __slots__ = ("bits", "chain", "last", "num_blocks", "run_length")

    def __init__(self, bits: int, run: Sequence[bytes] = ()) -> None:
        self.bits = bits
        self.num_blocks = 0
        self.run_length = len(run)
        self.last = run[-1] if run else b""
        self.chain: Chain | None = None

    @property
    def group(self) -> Holders | Chain | None:
        """The largest of which two blocks say that it has those in between; None: there is none."""
        if self.num_blocks != self.run_length:
            return None
        return self.chain if self.chain is not None and self.chain.is_whole else self


def tie(runs: Iterable[Holders | None]) -> None:
    """Make a chain of whole runs that lie one behind the other and have the same bits."""
    chain = Chain()
    for one in runs:
        assert one is not None, "what lies between has no bits"
        one.chain = chain


class HolderSets:
    """All sets that blocks have. Whoever keeps the blocks says which join and which leave."""

    def __init__(self) -> None:
        self._by_bits: dict[int, Holders] = {}  # those of any blocks
        self._runs: set[Holders] = set()
        self._merged: list[Holders] = []  # equal to another one since a worker left, or empty

    @property
    def num_unheld(self) -> int:
        """Blocks that nobody holds since their workers left."""
        return sum(one.num_blocks for one in self._merged if not one.bits)

    def join(self, run: Sequence[bytes], bits: int) -> Holders:
        """The set that blocks which lie one behind the other, at most ``MAX_RUN``, have from now
        on."""
        if len(run) >= _MIN_RUN:
            holders = Holders(bits, run)
            self._runs.add(holders)
            holders.num_blocks = len(run)
        else:
            holders = self.join_any(bits, len(run))
        return holders

    def join_any(self, bits: int, num_blocks: int) -> Holders:
        """The same for so many blocks of which nothing is to be told by each other."""
        holders = self._by_bits.get(bits)
        if holders is None:
            holders = self._by_bits[bits] = Holders(bits)
        holders.num_blocks += num_blocks
        return holders

    def leave(self, holders: Holders, num_blocks: int) -> None:
        """So many blocks have another set, or are gone."""
        holders.num_blocks -= num_blocks
        if holders.chain is not None:
            holders.chain.is_whole = False
        if holders.num_blocks:
            return
        self._runs.discard(holders)
        if self._by_bits.get(holders.bits) is holders:
            del self._by_bits[holders.bits]

    def strike(self, mask: int) -> None:
        """Take these bits out of all sets."""
        self.forget_empty()
        for holders in self._merged:
            holders.bits &= ~mask
        for holders in [one for one in self._runs if one.bits & mask]:
            holders.bits &= ~mask
            if not holders.bits:
                self._runs.remove(holders)
                self._merged.append(holders)
        changed = [holders for holders in self._by_bits.values() if holders.bits & mask]
        for holders in changed:
            del self._by_bits[holders.bits]
            holders.bits &= ~mask
        for holders in changed:
            if holders.bits and holders.bits not in self._by_bits:
                self._by_bits[holders.bits] = holders
            else:
                self._merged.append(holders)

    def forget_empty(self) -> None:
        """Drop those that no block has any more."""
        self._merged = [holders for holders in self._merged if holders.num_blocks]

    def check_invariants(self, blocks: Mapping[bytes, Holders], living: int) -> None:
        """Raise AssertionError when sets and ``blocks`` contradict each other.

        Args:
            living: the bits of all workers that are there.
        """
        used: dict[int, int] = {}
        for holders in blocks.values():
            used[id(holders)] = used.get(id(holders), 0) + 1
        known = [*self._by_bits.values(), *self._runs, *self._merged]
        assert len({id(holders) for holders in known}) == len(known), "a set is kept twice"
        for holders in known:
            assert used.pop(id(holders), 0) == holders.num_blocks, "a set is counted wrong"
        assert not used, "a block has a set that nobody knows"
        assert all(not holders.bits & ~living for holders in known), "somebody gone holds a block"
        for holders in self._runs:
            assert 0 < holders.num_blocks <= holders.run_length, "a run has grown"
            assert holders.bits, "a run that nobody holds is kept as one"
            is_whole = holders.num_blocks == holders.run_length
            assert not is_whole or blocks[holders.last] is holders, "its last block is not"
        chained = [(one.chain, one.bits) for one in self._runs if one.chain and one.chain.is_whole]
        assert len({chain for chain, _ in chained}) == len(set(chained)), "a chain is mixed"
        for bits, holders in self._by_bits.items():
            assert bits == holders.bits != 0, "a set is kept under other bits"
            assert holders.num_blocks > 0, "a set without blocks is kept"
