"""Who is computed in the next step: pure decisions over sequences and the block pool.

A step takes every decoding sequence first, one token each, then chunks of what is left to compute,
oldest first, up to a budget of tokens. Sequences join and leave between any two steps.

Nobody starves. "Old" is who stands far in front in line (``workers/engine/line.py``): who came
first, but for requests that were sent to overtake a few. Waiting sequences start in that order; one
that overtakes goes before a prompt of another that is half computed, too, where there is room for
both, and a step that ends its prompt takes no prompt behind it along. When the pool is out, the
youngest owner of blocks gives its up (its tokens stay, their KV is computed again later, from the
prefix cache where that still has it) and waits in its old place in line; so the oldest always gets
on, and the pool is large enough for it, since ``Engine.add`` refused it otherwise. KV that arrives
from outside has no place in line before it is there: it gets the room that is left when those who
had begun, and the first in line, have theirs; else it would take each block that comes free.

What the host tier has of a sequence is brought into the pool before it starts, and for those next
in line before their turn; the head waits for that as it waits for room, and others run meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import msgspec

from schemas.errors import ConfigError
from workers.engine.block_pool import BlockPool, Run
from workers.engine.reuse import Reuse
from workers.engine.sequence import ROOT, Group, Sequence, num_blocks_for

_NUM_PREFETCHED = 4  # how far back in line blocks are brought from the host tier before their turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Bounds of one step.

    Raises:
        ConfigError: a bound under 1, or a token budget too small for one token per sequence.
    """

    max_batch_tokens: int = 512  # 435 ms of prefill on two cores: what a running answer may wait
    max_num_sequences: int = 64

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ConfigError("max_num_sequences must be at least 1", param="max_num_sequences")
        if self.max_batch_tokens < self.max_num_sequences:
            raise ConfigError(
                "max_batch_tokens must be at least max_num_sequences", param="max_batch_tokens"
            )


class Step(msgspec.Struct):
    """A step, in the making and made.

    Attributes:
        batch: who computes; what, say the ``start``, ``count`` and ``sample`` of each: from its
            counter on so many positions, and whether the last one's logits give the next token.
        forks: those of them with a ``copy`` to be done before. In order, for a source may be free
            by now, and be the target of a later one.
        budget: positions that it still has room for.
    """

    budget: int
    batch: list[Sequence] = []
    forks: list[Sequence] = []

    def add(self, sequence: Sequence, count: int, copy: tuple[int, int] | None = None) -> None:
        """Let it compute ``count`` positions. The rest of a prompt that overtakes closes the
        step."""
        group = sequence.group
        is_last = count == sequence.num_uncomputed_tokens
        closes = is_last and group.overtakes and not sequence.is_decoding
        sequence.start, sequence.count = sequence.num_computed_tokens, count
        sequence.sample = is_last and sequence.index != ROOT
        sequence.scores = None if group.scores is None else group.scores_to_fill
        sequence.copy = copy
        if copy is not None:
            self.forks.append(sequence)
        self.batch.append(sequence)
        self.budget = 0 if closes else self.budget - count

    def drop(self, sequence: Sequence) -> None:
        """Let it compute nothing after all."""
        if sequence in self.batch:
            self.batch.remove(sequence)
            self.budget += sequence.count
        if sequence in self.forks:
            self.forks.remove(sequence)


class Scheduler:
    """Sequences by state, each list from old to young; no two have one age.

    ``waiting``: to be computed; without blocks, except those that came with imported KV.
    ``running``: in the batch. ``parked``: nothing to compute now, but their blocks are wanted:
    roots, and held sequences.
    """

    def __init__(self, pool: BlockPool, config: EngineConfig) -> None:
        self.pool = pool
        self.config = config
        self.reuse = Reuse(pool)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.num_preemptions = 0

    # ---- in and out ----------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """Put it in line, in its place by age."""
        insort(self.waiting, sequence, key=_age)

    def adopt(self, sequence: Sequence) -> None:
        """The same for one whose block table and counter tell of KV that was imported. What is
        found in the pool then is that very KV: none of it counts as cached."""
        sequence.group.has_started = True
        self.pool.register_runs([_run(sequence, self.pool.block_size)])
        if sequence.is_root and sequence.num_uncomputed_tokens == 0:
            self.park(sequence)
        else:
            self.enqueue(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take it out of line and batch, with its blocks."""
        self._forget(sequence)
        insort(self.parked, sequence, key=_age)
        if sequence.is_root:
            pending, sequence.group.pending = sequence.group.pending, []
            for choice in pending:
                self.enqueue(choice)

    def remove(self, sequence: Sequence) -> None:
        """It ended: its blocks go back."""
        self._forget(sequence)
        self._drop_blocks(sequence)

    def sequences(self) -> Iterator[Sequence]:
        """All that are known, in no order."""
        return chain(self.waiting, self.running, self.parked)

    def num_promised(self) -> int:
        """Slots that running sequences still need for tokens they have: prompts half computed."""
        return sum(max(0, self._num_missing(sequence)) for sequence in self.running)

    def num_owed(self) -> int:
        """Slots that are not for KV from outside: those promised, and what those in line need that
        have begun before, preempted most of them, or are next."""
        owed = self.num_promised()
        for place, sequence in enumerate(self.waiting):
            if place == 0 or sequence.group.has_started:
                owed += max(0, self._num_missing(sequence) - self._num_to_fork(sequence))
        return owed

    def complete(self, batch: Seq[Sequence]) -> None:
        """What the step planned for these was computed."""
        size = self.pool.block_size
        filled: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in batch:
            count = sequence.count
            sequence.num_computed_tokens = after = sequence.start + count
            if after % size < count:  # a block's end is behind one of them
                filled.append(sequence)
            if not sequence.sample:
                others.append(sequence)
        if filled:
            self.pool.register_runs([_run(sequence, size) for sequence in filled])
        for sequence in others:
            if sequence.is_root and sequence.num_uncomputed_tokens == 0:
                self.park(sequence)

    # ---- the decision --------------------------------------------------------------------

    def schedule(self) -> Step:
        """The next step: what runs already, decodes first, then what starts, in that order.

        Its batch is empty: nothing can run until something is added or released.
        """
        step = Step(self.config.max_batch_tokens)
        others: list[Sequence] = []
        if without := self._decodes(step, others):
            self._extend_decodes(without, step)
        for sequence in others:
            self._admit_in_order(step, before=sequence)
            if sequence.block_table and step.budget:
                count = min(sequence.num_uncomputed_tokens, step.budget)
                self._extend(sequence, count, step)
        self._admit_in_order(step)
        if not step.batch and self.waiting:
            self._admit_by_force(self.waiting[0], step)
        if self.waiting:
            self._prefetch()
        return step

    def _decodes(self, step: Step, others: list[Sequence]) -> list[Sequence]:
        """Add what decodes and has a slot for it, which is nearly all in nearly all steps, and put
        what does not decode into ``others``; returns what decodes but needs another slot."""
        size, batch = self.pool.block_size, step.batch
        without: list[Sequence] = []
        for sequence in self.running:
            num_computed = sequence.num_computed_tokens
            if not num_computed or len(sequence.token_ids) != num_computed + 1:
                others.append(sequence)
            elif not num_computed % size and num_computed == len(sequence.block_table) * size:
                without.append(sequence)
            elif sequence.scores is not None or sequence.index == ROOT:
                step.add(sequence, 1)
            else:
                sequence.start = num_computed
                if sequence.count != 1 or not sequence.sample:  # to look costs less than to set
                    sequence.count, sequence.sample = 1, True
                batch.append(sequence)
        step.budget = self.config.max_batch_tokens - len(batch)
        return without

    def _extend_decodes(self, sequences: list[Sequence], step: Step) -> None:
        """The same for some that decode and need a block each."""
        blocks = self.pool.allocate(len(sequences))
        if blocks is not None:
            for sequence, block in zip(sequences, blocks, strict=True):
                sequence.block_table.append(block)
                step.add(sequence, 1)
            return
        for sequence in sequences:
            if sequence.block_table:  # else one before it took them
                self._extend(sequence, 1, step)

    def _extend(self, sequence: Sequence, count: int, step: Step) -> None:
        """Get slots for the next ``count`` positions, if need be those of younger sequences."""
        while not self._grow(sequence, count):
            victim = self._victim(sequence)
            self._preempt(victim or sequence, step)
            if victim is None:
                return
        step.add(sequence, count)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        end = sequence.num_computed_tokens + count
        if end <= len(sequence.block_table) * self.pool.block_size:
            return True
        missing = num_blocks_for(end, self.pool.block_size) - len(sequence.block_table)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            sequence.block_table += blocks
        return True

    # ---- starting ------------------------------------------------------------------------

    def _admit_in_order(self, step: Step, before: Sequence | None = None) -> None:
        """Start who waits; with ``before`` those who are older than that one, as far as all who run
        keep the room that they still need."""
        while self.waiting and step.budget and len(self.running) < self.config.max_num_sequences:
            head = self.waiting[0]
            if before is not None:
                if head.age > before.age:
                    return
                if self._num_missing(head) > self.pool.num_available - self.num_promised():
                    return
            if not self._admit(head, step):
                return

    def _admit_by_force(self, head: Sequence, step: Step) -> None:
        """Nothing runs, so only parked roots, and KV of those further back in line, can be in the
        head's way."""
        assert not self.running, "a running sequence was neither planned nor preempted"
        while not self._admit(head, step):
            victim = None if self.reuse.is_coming(head) else self._victim(head)
            if victim is None:
                return
            self._preempt(victim, step)

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Start it if all its tokens find room, and none of its blocks is still to come. Budget is
        left, so what runs has its room."""
        has_import = bool(sequence.block_table)
        source = None if has_import else self.reuse.take(sequence)
        has_no_room = self._num_missing(sequence) > self.pool.num_available
        if has_no_room or (not has_import and self.reuse.is_coming(sequence)):
            if not has_import:
                self._drop_blocks(sequence)
            return False
        if not sequence.group.has_started:
            self.reuse.count(sequence)
        copy = None
        if source is not None:
            self._grow(sequence, 0)  # the target of the copy
            copy = (source, sequence.block_table[-1])
        self._start(sequence)
        count = min(sequence.num_uncomputed_tokens, step.budget)
        has_room = self._grow(sequence, count)
        assert has_room, "room was counted before"
        step.add(sequence, count, copy)
        return True

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_age)
        group = sequence.group
        group.has_started = True
        if sequence.has_started or sequence.is_root:
            return
        sequence.has_started = True
        group.num_unstarted -= 1
        if group.num_unstarted == 0 and group.root is not None and not group.keeps_root:
            self._drop_root(group)

    def _prefetch(self) -> None:
        """Bring blocks of those next in line as far as there will be room for them, when those
        before them have theirs and whatever runs has grown by a block."""
        if self.reuse.arrivals is None:
            return
        room = self.pool.num_available - self.num_promised() - len(self.running)
        for sequence in self.waiting[:_NUM_PREFETCHED]:
            room -= self._num_missing(sequence)
            if room < 0:
                return
            if not sequence.has_looked_below and not sequence.block_table:
                sequence.has_looked_below = True
                self.reuse.is_coming(sequence)

    # ---- giving up blocks ----------------------------------------------------------------

    def _victim(self, requester: Sequence) -> Sequence | None:
        """Whose blocks the requester may have: a root that is only a short cut, else those of the
        youngest that is younger than the requester."""
        for sequence in reversed(self.parked):
            if _is_short_cut(sequence):
                return sequence
        owners = (s for s in self.sequences() if s.block_table and not s.group.is_held)
        youngest = max(owners, key=_age, default=requester)
        return youngest if youngest.age > requester.age else None

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Take its blocks; what must be computed again goes back to its place in line."""
        step.drop(sequence)
        if sequence in self.parked and _is_short_cut(sequence):
            self._drop_root(sequence.group)
            return
        self.num_preemptions += 1
        sequence.has_looked_below, sequence.num_promotions = False, 0
        self._forget(sequence)
        self._drop_blocks(sequence)
        insort(self.waiting, sequence, key=_age)

    def _drop_root(self, group: Group) -> None:
        root, group.root = group.root, None
        assert root is not None, "there is no root to drop"
        self.remove(root)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def _forget(self, sequence: Sequence) -> None:
        for line in (self.running, self.waiting, self.parked):
            at = bisect_left(line, sequence.age, key=_age)
            if at < len(line) and line[at] is sequence:
                del line[at]

    # ---- small facts ---------------------------------------------------------------------

    def _num_missing(self, sequence: Sequence) -> int:
        needed = num_blocks_for(len(sequence.token_ids), self.pool.block_size)
        return needed - len(sequence.block_table)

    def _num_to_fork(self, sequence: Sequence) -> int:
        """Blocks that it will share with its root, when it starts."""
        root = sequence.group.root
        if root is None or sequence.is_root or sequence.block_table:
            return 0
        return root.num_computed_tokens // self.pool.block_size


def _run(sequence: Sequence, block_size: int) -> Run:
    """The blocks that have become full since the step began that was planned for it last."""
    first, end = sequence.start // block_size, sequence.num_computed_tokens // block_size
    hashes = sequence.prefix_hashes(end, block_size)
    parent = hashes[first - 1] if first else sequence.group.salt
    return sequence.block_table[first:end], hashes[first:], parent


def _is_short_cut(sequence: Sequence) -> bool:
    """Whether it is a root that nobody asked to hold: choices get on without it, if slower."""
    return sequence.is_root and not sequence.group.keeps_root


_age = attrgetter("age")
