"""Which workers hold the beginning of a prompt, and in which tier.

A prefix hash covers its block and everything before it, so a hash *is* a path from the root of the
radix tree: the tree needs no edges, a table from hash to holders has every node of it. To walk down
a prompt is to look its hashes up one after the other.

    hash -> Holders, shared by blocks that the same workers hold in the same tiers

         bit 3w      worker w has it in device memory
         bit 3w + 1                 in host memory
         bit 3w + 2                 on its disk

A worker that leaves is struck out of the holder sets, not of the blocks: its place ``w`` is free at
once. Blocks that nobody holds any more are swept out later, a few thousand at a time. Parents are
not needed, so a block whose parent was never heard of is as good as any.

Blocks that were stored one behind the other have a set of their own. While it still has all of them
(it loses those of which something else becomes true, and never gets others) it is whole: who meets
it, and then its last block or it again, need not look in between. So a lookup touches one entry of
the table for each such run, wherever in memory they are, not one per block. Runs with the same
holders that a lookup has passed one behind the other are a chain from then on, until one of them
loses a block: of a chain, too, who meets two blocks knows those in between.

Pure, and bounded: over ``max_blocks`` those go that were stored or touched longest ago. Of a run
that came as one, the last block counts as the oldest: an earlier one is of use without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice

from pipeline.holders import MAX_RUN, Chain, Holders, HolderSets, tie
from pipeline.prefix_walk import BITS, NOBODY, TIERS, Found, Match, Roll, Walk
from schemas.kv_events import KvTier

_OFFSET = {tier: number for number, tier in enumerate(TIERS)}
_PRESSURE = 0.75  # of max_blocks: below it nothing goes, so nobody has to know what is in use
_EVICT_SHARE = 256  # at the limit this part goes at once: looking for the oldest costs a scan
_STRIDE = 64  # hashes of a prompt that are taken at once


class RadixIndex:
    """The blocks of all workers. Workers are known from the first block that they store.

    Args:
        max_blocks: distinct blocks that are kept.

    Raises:
        ValueError: ``max_blocks`` is not positive.

    Cost: 110 to 190 bytes per block.
    """

    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks must be positive, not {max_blocks}")
        self.max_blocks = max_blocks
        self.num_evicted = 0  # blocks that went for want of room
        self._blocks: dict[bytes, Holders] = {}  # longest untouched first
        self._sets = HolderSets()
        self._places: dict[str, int] = {}
        self._workers: list[str | None] = []  # by place
        self._roll: Roll | None = None  # the same, until somebody comes or goes
        self._to_sweep: list[bytes] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that somebody holds."""
        return len(self._blocks) - self._sets.num_unheld

    @property
    def is_crowded(self) -> bool:
        """Whether blocks may have to go soon, so that it matters which are in use."""
        return len(self._blocks) >= _PRESSURE * self.max_blocks

    @property
    def workers(self) -> list[str]:
        """Who has stored something and was not dropped, sorted."""
        return sorted(self._places)

    @property
    def is_empty(self) -> bool:
        """Whether there is no such worker."""
        return not self._places

    # Asking ----------------------------------------------------------------------------------

    @property
    def roll(self) -> Roll:
        """Which worker has which place now; the same object until somebody comes or goes."""
        if self._roll is None:
            self._roll = Roll(self._workers)
        return self._roll

    def lookup(self, hashes: Iterable[bytes]) -> list[Match]:
        """Who holds the first of ``hashes``, and how far; by worker id. Takes few more of them than
        somebody holds, of an unknown prompt one. Counts as no use."""
        return list(self.lookup_runs(_strides(iter(hashes))).values())

    def lookup_runs(self, runs: Iterable[Sequence[bytes]], among: int = -1) -> Found:
        """The same of hashes that come in runs, one behind the other; takes another one only when
        somebody holds all of those before.

        Args:
            among: bits of the roll: who is asked about. By default everybody.
        """
        runs = iter(runs)
        first = next(runs, ())
        if not first or first[0] not in self._blocks:
            return NOBODY  # as for most prompts
        walk = Walk()
        passed: list[Holders | None] = []
        number = self._go(walk, chain((first,), runs), among, passed)
        if not number:
            return NOBODY
        for bits, some in groupby(passed, key=lambda one: one and one.bits):
            if bits and len(tied := list(some)) > 1:
                tie(tied)
        return walk.end(number, self.roll)

    def _go(
        self,
        walk: Walk,
        runs: Iterable[Sequence[bytes]],
        among: int,
        passed: list[Holders | None],
    ) -> int:
        """Go down as far as anybody comes along; the number of blocks until there.

        Args:
            passed: gets the whole runs on the way that are in no chain; None: others are between.
        """
        number, get = 0, self._blocks.get
        bits, since = -1, 0  # the last holders, who of them, where they were met
        before: Holders | None = None
        group: Holders | Chain | None = None  # that the last block is in
        for run in runs:
            at, end = 0, len(run)
            if group is not None and self._is_in(group, run[-1]):
                at = end
            while at < end:
                holders = get(run[at])
                if holders is None:
                    return number + at
                if holders is not before:
                    before, since = holders, number + at
                    if holders.bits & among != bits:
                        bits = holders.bits & among
                        if not walk.go_on(bits, since):
                            return since
                group = holders.group
                if group is None:
                    passed.append(None)
                    at += 1
                    continue
                passed.append(holders if group is holders else None)
                stop = since - number + holders.run_length
                if group is holders and at < stop <= end and run[stop - 1] == holders.last:
                    at = stop  # mostly it is met at its first block
                else:
                    at = self._end_of(group, run, at)
            number += end
        return number

    def _is_in(self, group: Holders | Chain, block_hash: bytes) -> bool:
        holders = self._blocks.get(block_hash)
        return holders is not None and (holders is group or holders.chain is group)

    def _end_of(self, group: Holders | Chain, hashes: Sequence[bytes], at: int) -> int:
        """The first place behind ``at`` that is not in ``group``, as the block there is."""
        first, end = at, len(hashes)
        if self._is_in(group, hashes[-1]):
            return end
        while end - first > 1:
            middle = (first + end) // 2
            if self._is_in(group, hashes[middle]):
                first = middle
            else:
                end = middle
        return first + 1

    def held_by(self, worker: str) -> dict[bytes, tuple[KvTier, ...]]:
        """All blocks of a worker, with their tiers. Walks through the whole index."""
        place = self._places.get(worker)
        if place is None:
            return {}
        found: dict[bytes, tuple[KvTier, ...]] = {}
        for block_hash, holders in self._blocks.items():
            own = holders.bits >> (BITS * place)
            tiers = tuple(tier for tier in TIERS if own >> _OFFSET[tier] & 1)
            if tiers:
                found[block_hash] = tiers
        return found

    # Telling ---------------------------------------------------------------------------------

    def stored(
        self, worker: str, tier: KvTier, hashes: Sequence[bytes], also: Sequence[KvTier] = ()
    ) -> None:
        """``worker`` has these in ``tier``, and in those of ``also``. They lie one behind the
        other: each but the first has the one before it as its parent."""
        bits, blocks = _bits(self._place(worker), tier, also), self._blocks
        if len(hashes) == 1 and hashes[0] not in blocks and len(blocks) < self.max_blocks:
            blocks[hashes[0]] = self._sets.join_any(bits, 1)  # decoding has filled it: most have
            return
        hashes = hashes[: self.max_blocks]
        end = len(hashes)
        if len(self._blocks) + end > self.max_blocks:  # else there is room, even if all are new
            self._make_room(hashes)
        olds = [*map(self._blocks.get, hashes)]
        if end and olds.count(olds[0]) == end:  # mostly all are new, or one run in another tier
            self._add(bits, hashes, olds[0])
            return
        for old, run in groupby(map(self._blocks.get, reversed(hashes))):
            start = end - len(list(run))
            self._add(bits, hashes[start:end], old)
            end = start

    def removed(
        self, worker: str, tier: KvTier, hashes: Iterable[bytes], also: Sequence[KvTier] = ()
    ) -> None:
        """``worker`` has these no more in ``tier``, nor in those of ``also``. What is not known is
        passed over."""
        place = self._places.get(worker)
        if place is None:
            return
        bits = _bits(place, tier, also)
        for block_hash in hashes:
            holders = self._blocks.get(block_hash)
            if holders is None or not holders.bits & bits:
                continue
            left = holders.bits & ~bits
            if left:
                self._move((block_hash,), holders, left)
            else:
                del self._blocks[block_hash]
                self._sets.leave(holders, 1)

    def drop(self, worker: str) -> None:
        """``worker`` has nothing any more. Costs a look at each set of holders, not at blocks."""
        place = self._places.pop(worker, None)
        if place is None:
            return
        self._workers[place] = self._roll = None
        self._sets.strike(_all_bits(place))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """These are of use: they go last. Does nothing while there is plenty of room."""
        if not self.is_crowded:
            return
        for block_hash in reversed(hashes):
            holders = self._blocks.pop(block_hash, None)
            if holders is not None:
                self._blocks[block_hash] = holders

    def sweep(self, max_steps: int) -> None:
        """Look at no more than ``max_steps`` blocks for those that nobody holds since their worker
        left."""
        if not self._to_sweep:
            self._sets.forget_empty()
            if not self._sets.num_unheld:
                return
            self._to_sweep = list(self._blocks)
        for block_hash in self._to_sweep[-max_steps:]:
            holders = self._blocks.get(block_hash)
            if holders is not None and not holders.bits:
                self._forget(block_hash)
        del self._to_sweep[-max_steps:]

    # The books -------------------------------------------------------------------------------

    def _place(self, worker: str) -> int:
        place = self._places.get(worker)
        if place is None:
            place = self._workers.index(None) if None in self._workers else len(self._workers)
            self._workers[place : place + 1] = [worker]
            self._places[worker] = place
            self._roll = None
        return place

    def _add(self, bits: int, run: Sequence[bytes], old: Holders | None) -> None:
        """Blocks one behind the other, all with ``old``, are held at ``bits``, too."""
        if old is None:
            self._move(run, None, bits)
        elif bits & ~old.bits:
            self._move(run, old, old.bits | bits)

    def _move(self, run: Sequence[bytes], old: Holders | None, bits: int) -> None:
        """Blocks one behind the other, all with ``old``, get holders ``bits``."""
        for start in range(0, len(run), MAX_RUN):
            part = run if len(run) <= MAX_RUN else run[start : start + MAX_RUN]
            new = self._sets.join(part, bits)
            for block_hash in reversed(part):
                self._blocks[block_hash] = new
        if old is not None:
            self._sets.leave(old, len(run))

    def _forget(self, block_hash: bytes) -> None:
        self._sets.leave(self._blocks.pop(block_hash), 1)

    def _make_room(self, hashes: Sequence[bytes]) -> None:
        """For all of ``hashes`` that are new, evict others, a share of the whole at least."""
        while (num_new := sum(one not in self._blocks for one in hashes)) and (
            num_over := len(self._blocks) + num_new - self.max_blocks
        ) > 0:
            num_going = max(num_over, self.max_blocks // _EVICT_SHARE)
            going = list(islice(self._blocks, num_going))
            for block_hash in going:
                self._forget(block_hash)
            self.num_evicted += len(going)

    def check_invariants(self) -> None:
        """Raise AssertionError when counts, sets and blocks contradict each other."""
        assert len(self._blocks) <= self.max_blocks, "over the limit"
        assert all(self._workers[place] == one for one, place in self._places.items())
        assert self.roll.places == self._places, "a roll that was left behind"
        assert len(self._places) == sum(worker is not None for worker in self._workers)
        living = sum(map(_all_bits, self._places.values()))
        self._sets.check_invariants(self._blocks, living)


def _bits(place: int, tier: KvTier, also: Sequence[KvTier]) -> int:
    bits = 1 << (BITS * place + _OFFSET[tier])
    for another in also:
        bits |= 1 << (BITS * place + _OFFSET[another])
    return bits


def _all_bits(place: int) -> int:
    return ((1 << BITS) - 1) << (BITS * place)


def _strides(hashes: Iterator[bytes]) -> Iterator[list[bytes]]:
    """First one, then some at once."""
    stride = list(islice(hashes, 1))
    while stride:
        yield stride
        stride = list(islice(hashes, _STRIDE))
