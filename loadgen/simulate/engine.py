"""The engine of a simulated worker: the scheduler's decisions, and how long its steps take.

What ``workers/engine/scheduler.py`` decides for each token is decided here for whole runs of steps:

    a step takes every decoding sequence, one token each, then chunks of what is left to compute,
    oldest first, up to a budget of tokens; who waits starts in its turn, when all of it finds room;
    the end of a prompt that overtakes closes the step; when the pool is out, the youngest owner of
    blocks gives its up

As long as no prompt is computed nothing changes until somebody comes or goes, and so many steps are
one event. ``tests/loadgen/simulate/test_engine.py`` holds both engines against each other.

Pure: the time is passed in, and whoever calls keeps the events.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from loadgen.simulate.decode_batch import DecodeBatch, Run
from loadgen.simulate.extents import ExtentPool
from loadgen.simulate.holdings import EngineSpec, Holdings
from loadgen.simulate.sequence import Sequence
from pipeline.cost_model import prefill_ms
from schemas.control import Load


@dataclass(slots=True)
class StepResult:
    """What a run of steps brought; sequences, in no order."""

    sampled: list[Sequence] = field(default_factory=list)  # got a token by computing a prompt
    held: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)


@dataclass(slots=True)
class _Plan:
    """A run of steps in the making, or on its way. Prompts are computed in one step alone."""

    budget: int
    run: Run | None = None
    num_allocated: int = 0  # blocks that those who decode have got for it
    num_decoding: int = 0  # of whose tokens the budget is less
    chunks: dict[Sequence, int] = field(default_factory=dict)


def _age(sequence: Sequence) -> int:
    return sequence.age


class VirtualEngine:
    """Sequences by state, each list from old to young, as in the scheduler.

    Attributes:
        num_preemptions: times that a sequence gave its blocks up.
        prefill_s: how long prompts were computed, with what decoded in the same steps.
        decode_s: how long steps took that only decoded.
        num_computed_tokens: of prompts.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.pool = ExtentPool(spec.num_blocks, spec.blocks_per_piece)
        self._holdings = Holdings(spec, self.pool)
        self.batch = DecodeBatch(spec.costs, spec.block_size)
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.held: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.num_computed_tokens = 0
        self._num_reserved = 0  # blocks
        self._num_arriving = 0  # sequences whose KV is on its way into those
        self._arriving_tokens = 0
        self._plan: _Plan | None = None

    # ---- in and out ----------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """Put it in line, in its place by age."""
        insort(self.waiting, sequence, key=_age)

    def reserve(self, num_tokens: int) -> bool:
        """Blocks for so many tokens, to be filled from outside; False: no room now."""
        count = self._holdings.blocks_for(num_tokens)
        if count > self.pool.num_available - self._num_owed():
            return False
        self._num_reserved += count
        self._num_arriving += 1
        self._arriving_tokens += num_tokens
        return self.pool.allocate(count)

    def adopt(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of its first ``num_tokens`` has come into blocks that were reserved."""
        sequence.num_private = self._holdings.blocks_for(num_tokens)
        self._num_reserved -= sequence.num_private
        self._num_arriving -= 1
        self._arriving_tokens -= num_tokens
        sequence.num_computed = num_tokens
        sequence.num_cached = 0
        self._holdings.register(sequence)
        self.enqueue(sequence)

    def store(self, pieces: tuple[bytes, ...], num_blocks: int) -> bool:
        """Blocks of a prompt's beginning came from elsewhere, and can be found from now on; False:
        there was no room for them."""
        return self._holdings.store(pieces, num_blocks)

    def release(self, sequence: Sequence) -> None:
        """It was held, and is not needed any more: its blocks go back."""
        self.held.pop(sequence, None)
        self._holdings.drop(sequence)

    # ---- steps ---------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether steps are on their way."""
        return self._plan is not None

    def start(self, now_s: float) -> float | None:
        """Begin the next run of steps; when it ends, None when there is nothing to run."""
        assert self._plan is None, "steps are on their way"
        plan = _Plan(self.spec.max_batch_tokens)
        self._plan_decodes(plan)
        # A prompt's last position, when it is left alone, goes with what decodes.
        for sequence in sorted(self.prefilling, key=lambda one: not one.is_decoding):
            if not sequence.is_decoding:
                self._admit_in_order(plan, before=sequence)
            if sequence in self.prefilling and plan.budget > 0:
                self._extend(sequence, min(sequence.num_uncomputed, plan.budget), plan)
        self._admit_in_order(plan)
        if not plan.chunks and not self.batch and self.waiting:
            self._admit_by_force(self.waiting[0], plan)
        if not plan.chunks and not self.batch:
            return None
        plan.run = self._make_run(plan, now_s)
        self._plan = plan
        return plan.run.end_s

    def cut(self, now_s: float) -> float:
        """Somebody has come: the step that runs now is the last of its run; when it ends. Before
        anybody else may have blocks, those steps get theirs."""
        plan = self._plan
        assert plan is not None, "nothing is on its way"
        assert plan.run is not None, "nothing is on its way"
        run = plan.run
        if run.num_steps > 1:
            num_steps = run.num_begun(now_s)
            run = plan.run = Run(run.start_s, run.first_s, run.growth_s, num_steps)
        self._allocate_steps(plan, run.num_steps)
        return run.end_s

    def finish(self) -> StepResult:
        """The run is over: what it brought."""
        plan, self._plan = self._plan, None
        assert plan is not None, "nothing is on its way"
        assert plan.run is not None, "nothing is on its way"
        run, result = plan.run, StepResult()
        if self.batch:
            self._allocate_steps(plan, run.num_steps)
            self.batch.advance(run)
            result.ended += map(self._left, self.batch.pop_ended())
        if plan.chunks:
            self.prefill_s += run.end_s - run.start_s
        else:
            self.decode_s += run.end_s - run.start_s
        for sequence, count in plan.chunks.items():
            self._complete(sequence, count, run.end_s, result)
        for sequence in result.ended:
            self._holdings.keep_answer(sequence)
            self._holdings.drop(sequence)
        return result

    def _make_run(self, plan: _Plan, now_s: float) -> Run:
        if plan.chunks:
            return self.batch.next_run(now_s, 1, self._chunks_ms(plan))
        most = self.batch.num_steps_to_end()
        room = self.pool.num_available + plan.num_allocated
        return self.batch.next_run(now_s, self.batch.num_steps_within(room, most))

    def _allocate_steps(self, plan: _Plan, num_steps: int) -> None:
        """Blocks for so many steps; those of one that was cut off before it began go back."""
        missing = self.batch.blocks_needed(num_steps) - plan.num_allocated
        plan.num_allocated += missing
        if missing < 0:
            self.pool.free(-missing)
        elif missing:
            has_room = self.pool.allocate(missing)
            assert has_room, "room was counted before"

    def _plan_decodes(self, plan: _Plan) -> None:
        """All who decode get what the next step takes, the youngest's blocks if need be."""
        while self.batch and self.batch.blocks_needed(1) > self.pool.num_available:
            youngest = self._youngest_owner()
            assert youngest is not None, "somebody decodes"
            self._preempt(youngest, plan)
        self._allocate_steps(plan, 1 if self.batch else 0)
        plan.num_decoding = len(self.batch)
        plan.budget -= plan.num_decoding

    def _extend(self, sequence: Sequence, count: int, plan: _Plan) -> None:
        """Get blocks for the next ``count`` positions, if need be those of younger ones."""
        while not self._holdings.grow(sequence, sequence.num_computed + count):
            victim = self._youngest_owner()
            if victim is None or victim.age <= sequence.age:
                self._preempt(sequence, plan)
                return
            self._preempt(victim, plan)
        closes = sequence.overtakes and count == sequence.num_uncomputed
        plan.budget = 0 if closes and not sequence.is_decoding else plan.budget - count
        plan.chunks[sequence] = count

    def _chunks_ms(self, plan: _Plan) -> float:
        """What a step's prompts cost, as the simulated engine counts: a base for all of them, each
        by its length; a single last token costs what one that decodes does."""
        costs, total, has_base = self.spec.costs, 0.0, False
        has_decode_base = len(self.batch) > 0
        for sequence, count in plan.chunks.items():
            start = sequence.num_computed
            if start and count == 1:
                total += costs.decode_sequence_ms + costs.decode_context_ms * (start + 1)
                total += 0.0 if has_decode_base else costs.decode_base_ms
                has_decode_base = True
                continue
            total += prefill_ms(costs, count, start, num_steps=0 if has_base else 1)
            has_base = True
        return total

    # ---- starting ------------------------------------------------------------------------

    def _admit_in_order(self, plan: _Plan, before: Sequence | None = None) -> None:
        """Start who waits; with ``before`` those who are older than that one, as far as all who run
        keep the room that they still need."""
        while self.waiting and plan.budget > 0 and self.num_running < self.spec.max_num_sequences:
            head = self.waiting[0]
            if before is not None and not (head.age < before.age and self._has_spare(head)):
                return
            if not self._admit(head, plan):
                return

    def _has_spare(self, sequence: Sequence) -> bool:
        missing = self._holdings.blocks_for(sequence.num_tokens) - sequence.num_blocks
        return missing <= self.pool.num_available - self._num_promised()

    def _admit_by_force(self, head: Sequence, plan: _Plan) -> None:
        """Nothing runs, so only KV of those further back in line can be in the head's way."""
        while not self._admit(head, plan) and not head.is_coming:
            victim = self._youngest_owner()
            if victim is None or victim.age <= head.age:
                return
            self._preempt(victim, plan)

    def _admit(self, sequence: Sequence, plan: _Plan) -> bool:
        """Start it if all its tokens find room, and none of its blocks is still to come."""
        if sequence.is_coming:
            return False
        has_import = sequence.num_blocks > 0
        if not has_import:
            self._holdings.take_prefix(sequence)
        missing = self._holdings.blocks_for(sequence.num_tokens) - sequence.num_blocks
        if missing > self.pool.num_available:
            if not has_import:
                self._holdings.drop(sequence)
            return False
        if sequence.num_cached < 0:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        self.waiting.remove(sequence)
        if has_import and sequence.is_decoding:
            self.batch.join(sequence)
            plan.num_allocated += missing
            self.pool.allocate(missing)
            plan.num_decoding += 1
            plan.budget -= 1
            return True
        insort(self.prefilling, sequence, key=_age)
        self._extend(sequence, min(sequence.num_uncomputed, plan.budget), plan)
        return True

    # ---- ending --------------------------------------------------------------------------

    def _complete(self, sequence: Sequence, count: int, end_s: float, result: StepResult) -> None:
        """A chunk was computed; with the last position comes a token."""
        sequence.num_computed += count
        self.num_computed_tokens += count
        self._holdings.register(sequence)
        if sequence.num_uncomputed:
            return
        self.prefilling.remove(sequence)
        sequence.num_tokens += 1
        sequence.segments.append(end_s)
        result.sampled.append(sequence)
        if sequence.num_missing <= 0:
            result.ended.append(sequence)
        elif sequence.holds:
            self.held[sequence] = None
            result.held.append(sequence)
        else:
            self.batch.join(sequence)

    # ---- giving up blocks ----------------------------------------------------------------

    def _youngest_owner(self) -> Sequence | None:
        """Of all who have blocks and are not held."""
        owners = [one for one in self.waiting if one.num_blocks]
        owners += self.prefilling[-1:]
        last = self.batch.youngest()
        owners += [last] if last is not None else []
        return max(owners, key=_age, default=None)

    def _preempt(self, sequence: Sequence, plan: _Plan) -> None:
        """Take its blocks; what it computed is computed again, from its place in line."""
        self.num_preemptions += 1
        sequence.has_looked_below = False
        count = plan.chunks.pop(sequence, None)
        plan.budget += count or 0
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._take_out(sequence, plan)
        self._holdings.drop(sequence)
        self.enqueue(sequence)

    def _take_out(self, sequence: Sequence, plan: _Plan) -> None:
        """Of the batch, and of what the next step has got for it."""
        self.batch.leave(sequence)
        self._left(sequence)
        spare = plan.num_allocated - self.batch.blocks_needed(1) if plan.num_allocated else 0
        if spare > 0:
            self.pool.free(spare)
            plan.num_allocated -= spare
        if plan.num_decoding:
            plan.num_decoding -= 1
            plan.budget += 1

    def _left(self, sequence: Sequence) -> Sequence:
        """It has left the batch, which took blocks for all together: these are its own."""
        sequence.num_private = (
            self._holdings.blocks_for(sequence.num_computed) - sequence.num_shared
        )
        return sequence

    # ---- facts ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self.batch) + len(self.prefilling)

    @property
    def num_free_to_promote(self) -> int:
        """Blocks that could be filled for those in line, when what runs has got its own."""
        return self.pool.num_available - self._num_promised() - self.num_running

    def busy_until_s(self, now_s: float) -> float:
        """When the step ends that computes prompts; ``now_s`` where there is none. Steps that only
        decode are short."""
        plan = self._plan
        if plan is None or plan.run is None or not plan.chunks:
            return now_s
        return max(now_s, plan.run.end_s)

    def load(self, now_s: float, num_free_slots: int) -> Load:
        """How busy it is, steps that are over by now included. Who is on its way into the batch,
        and has its blocks, counts as one of it."""
        run = None if self._plan is None else self._plan.run
        num_over = 0 if run is None else run.num_over(now_s)
        grown = max(0, self.batch.blocks_needed(num_over) - self._num_allocated)
        to_compute = [*self.waiting, *self.prefilling]
        in_batch = self.batch.context_tokens + len(self.batch) * num_over
        return Load(
            num_running=self.num_running + self._num_arriving,
            num_waiting=len(self.waiting),
            num_free_slots=num_free_slots,
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_available - grown,
            waiting_tokens=sum(one.num_uncomputed for one in to_compute),
            waiting_ms=self._holdings.computing_ms(to_compute),
            context_tokens=in_batch + self._arriving_tokens,
        )

    @property
    def _num_allocated(self) -> int:
        return 0 if self._plan is None else self._plan.num_allocated

    def _num_promised(self) -> int:
        """Blocks that prompts half computed still need."""
        return sum(self._num_wanted(one) for one in self.prefilling)

    def _num_owed(self) -> int:
        """Blocks that are not for KV from outside: those promised, and what those in line need
        that have begun before, preempted most of them, or are next."""
        first = [one for one in self.waiting[:1] if one.num_cached < 0]
        begun = [one for one in self.waiting if one.num_cached >= 0]
        return self._num_promised() + sum(self._num_wanted(one) for one in first + begun)

    def _num_wanted(self, sequence: Sequence) -> int:
        """Blocks that it needs beside those it has."""
        return max(0, self._holdings.blocks_for(sequence.num_tokens) - sequence.num_blocks)

    def _owners(self) -> Iterator[Sequence]:
        return chain(self.waiting, self.prefilling, self.held, self.batch)

    def check_invariants(self) -> None:
        """Raise AssertionError when blocks or tokens are counted wrong."""
        self.batch.check_invariants()
        private = sum(one.num_private for one in self._owners()) + self._num_reserved
        for one in self.batch:
            computed = one.num_tokens - 1 + self.batch.step - one.joined_step
            private += self._holdings.blocks_for(computed) - one.num_blocks
        self.pool.check_invariants(private + self._num_allocated)
