"""The engine: ``step()`` is schedule, run, sample, report.

It knows no model (a runner does) and no bus; one thread uses it. Where it is given a host tier, it
sends there what it has computed, and gets back what is asked for again; see ``workers/kv/api.py``.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from infra.transport.shm import SharedPool
from pipeline.cost_model import chunk_squares, prefill_step_ms
from schemas.control import Load
from schemas.errors import EngineFailed, NoCapacity
from schemas.requests import SamplingParams
from workers.engine.active_request import ActiveRequest, check_request
from workers.engine.api import (
    BlockStates,
    EngineRequest,
    FailedRequest,
    Runner,
    Sampled,
    StepReport,
    TokenOutput,
)
from workers.engine.arrivals import Arrivals
from workers.engine.batch import Computed, execute
from workers.engine.block_pool import BlockPool
from workers.engine.books import block_states, check_books
from workers.engine.choice import Choice
from workers.engine.grammar import Grammars
from workers.engine.line import place_in_line
from workers.engine.output import Vocabulary
from workers.engine.scheduler import EngineConfig, Scheduler, Step
from workers.engine.sequence import Sequence, num_blocks_for
from workers.kv.api import BlockEvents
from workers.kv.mover import BlockMover
from workers.kv.pace import Pace
from workers.kv.tally import TierTally
from workers.step_meter import StepMeter, step_shape

__all__ = ["Engine", "EngineConfig"]

_log = structlog.get_logger(__name__)


class Engine:
    """See :class:`workers.engine.api.EngineApi` for what the calls promise.

    Attributes:
        pool: the memory from which other processes read blocks; where the runner has none of its
            own, it writes there. Slots beyond those of the runner are the host tier's.
        blocks: the books of the runner's slots.
        pace: how fast it is.
        meter: what its steps cost.
        grammars: what answers with a ``response_format`` keep to.
        runner: what computes; between steps it may be used beside the engine, for measuring.
    """

    def __init__(
        self,
        runner: Runner,
        pool: SharedPool,
        vocabulary: Vocabulary,
        config: EngineConfig | None = None,
        meter: StepMeter | None = None,
    ) -> None:
        self.info = runner.info
        self.pool = pool
        self.config = config or EngineConfig()
        self.pace = Pace()
        self.meter = meter or StepMeter()
        self.blocks = BlockPool(pool, self.info.block_size, self.info.num_blocks)
        self.scheduler = Scheduler(self.blocks, self.config)
        self.runner = runner
        self._vocabulary = vocabulary
        self.grammars = Grammars(vocabulary, self.info)
        self._requests: dict[str, ActiveRequest] = {}
        self._num_formats = 0  # of those, how many keep to a format
        self._ended: dict[str, ActiveRequest] = {}  # ended when they came; the next step says so
        self._reservations: dict[str, tuple[int, ...]] = {}
        self._num_arrived = 0
        self._is_stalled = False  # nothing fits until something is added or released

    def use_tiers(
        self, mover: BlockMover | None, tally: TierTally, events: BlockEvents | None = None
    ) -> None:
        """Before the first request: count in ``tally``, tell ``events`` what can be found, and use
        the host tier to which ``mover`` leads."""
        self.blocks.tally = self.scheduler.reuse.tally = tally
        self.blocks.events = events
        if mover is not None:
            self.blocks.lower = mover
            self.scheduler.reuse.arrivals = Arrivals(self.blocks, mover)

    # ---- in and out ----------------------------------------------------------------------

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile a ``response_format``, on the caller's thread.

        Raises:
            InvalidRequest: it can't be kept.
        """
        self.grammars.prepare(sampling.response_format)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Its reservation, if any, stays untouched when this raises.

        Raises:
            ContextTooLong: the prompt leaves no room in the context.
            NoCapacity: it could not be computed to its end even with the whole pool to itself.
            InvalidRequest: no prompt, an id outside the vocabulary, a format that can't be kept.
            ValueError: the key is taken, or the request contradicts itself.
        """
        if request.key in self._requests or request.key in self._ended:
            raise ValueError(f"{request.key} is here already")
        if request.imported_blocks != self._reservations.get(request.key, ()):
            raise ValueError(f"{request.key} imports other blocks than it reserved")
        check_request(request, self.info)
        place = place_in_line(self._num_arrived, overtakes=request.overtakes)
        active = ActiveRequest(request, place, self.info, self._vocabulary, self.grammars)
        num_needed, running = active.num_blocks_needed, active.running_choices
        if num_needed > self.blocks.num_blocks:
            raise NoCapacity(f"needs {num_needed} blocks, the pool has {self.blocks.num_blocks}")
        if request.imported_blocks and running:
            self.runner.import_blocks(request.imported_blocks)
        self._num_arrived += 1
        self._is_stalled = False
        imported = self._reservations.pop(request.key, ())
        if not running:
            self.blocks.release(imported)
            self._ended[request.key] = active
            return
        self._requests[request.key] = active
        for choice in running:
            choice.sequence.choice = choice
        self._num_formats += active.group.has_format
        self._enqueue(active, [choice.sequence for choice in running])

    def _enqueue(self, active: ActiveRequest, sequences: list[Sequence]) -> None:
        group = active.group
        group.num_unstarted = len(sequences)
        if group.root is not None:
            group.pending = sequences
            sequences = [group.root]
        if not active.request.imported_blocks:
            self.scheduler.enqueue(sequences[0])
            return
        sequence, unused = active.take_import()
        self.blocks.release(unused)
        self.scheduler.adopt(sequence)

    def reserve(self, key: str, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for ``num_tokens`` tokens, to be filled from outside; None: no room now, beside
        what sequences in line are owed.

        Raises:
            NoCapacity: the pool is smaller than that.
            ValueError: the key is taken.
        """
        if key in self._requests or key in self._ended or key in self._reservations:
            raise ValueError(f"{key} is here already")
        count = num_blocks_for(num_tokens, self.info.block_size)
        if count > self.blocks.num_blocks:
            raise NoCapacity(f"needs {count} blocks, the pool has {self.blocks.num_blocks}")
        if count > self.blocks.num_available - self.scheduler.num_owed():
            return None
        blocks = self.blocks.allocate(count)
        assert blocks is not None, "room was counted before"
        self._reservations[key] = tuple(blocks)
        return tuple(blocks)

    def release(self, key: str) -> None:
        """Forget ``key`` and give back what it holds; unknown keys are fine."""
        self._is_stalled = False
        self.blocks.release(self._reservations.pop(key, ()))
        self._ended.pop(key, None)
        active = self._requests.pop(key, None)
        if active is not None:
            self._num_formats -= active.group.has_format
            for sequence in active.sequences:
                sequence.choice = None
                self.scheduler.remove(sequence)

    # ---- the step ------------------------------------------------------------------------

    def collect(self) -> None:
        """Take in what came from the host tier; for whoever hears that a copy has ended."""
        arrivals = self.scheduler.reuse.arrivals
        if arrivals is not None and arrivals.collect():
            self._is_stalled = False

    def step(self) -> StepReport:
        """Schedule, run, sample, report."""
        started_s = self.pace.clock()
        self.collect()
        report = StepReport()
        report.finished += [ended.finished() for ended in self._ended.values()]
        self._ended.clear()
        step = self.scheduler.schedule()
        batch = step.batch
        self._is_stalled = not batch
        if step.forks:
            batch = self._copy_blocks(step, report)
        if self._num_formats:
            batch = self._find_allowed(batch, report)
        computed = self._compute(batch, started_s, report)
        if computed.failures:
            self._take_failures(computed, report)
        self.scheduler.complete(computed.batch)
        self._take_tokens(computed, report)
        return report

    def _compute(self, batch: list[Sequence], began_s: float, report: StepReport) -> Computed:
        """Run a step that began then, and learn from how long it took."""
        started_s = self.pace.clock()
        computed = execute(self.runner, batch)
        ended_s = self.pace.clock()
        report.num_computed_tokens = num_tokens = computed.num_tokens()
        if chunks := computed.prefilled(num_tokens):
            self.pace.prefill.observe(chunks, ended_s - started_s)
        if self.meter.is_learning:
            self.meter.note(step_shape(batch), ended_s - began_s)
        return computed

    def _copy_blocks(self, step: Step, report: StepReport) -> list[Sequence]:
        """Do the copies with which forks begin; returns who can run."""
        for sequence in step.forks:
            active = self._requests.get(sequence.group.key)
            if sequence.copy is None or active is None:
                continue
            try:
                self.runner.copy_block(*sequence.copy)
            except Exception as error:
                _log.error("block_copy_failed", key=active.key, exc_info=True)
                self._fail(active, error, report)
        return [one for one in step.batch if one.group.key in self._requests]

    def _find_allowed(self, batch: list[Sequence], report: StepReport) -> list[Sequence]:
        """Let each grammar say what may come next; returns who can run."""
        for sequence in batch:
            choice = sequence.choice
            if choice is None or choice.matcher is None or not sequence.sample:
                continue
            try:
                sequence.allowed = choice.matcher.allowed()
            except EngineFailed as error:
                self._fail(self._requests[choice.key], error, report)
        return [one for one in batch if one.group.key in self._requests]

    def _take_failures(self, computed: Computed, report: StepReport) -> None:
        """Fail the requests of which a sequence failed, as a whole."""
        for sequence, error in computed.failures:
            active = self._requests.get(sequence.group.key)
            if active is not None:
                self._fail(active, error, report)
        computed.keep(lambda sequence: sequence.group.key in self._requests)

    def _take_tokens(self, computed: Computed, report: StepReport) -> None:
        """Report sampled tokens, and the ends and holds that they bring."""
        outputs = report.outputs
        for sequence, sampled in zip(computed.batch, computed.tokens, strict=True):
            choice = sequence.choice
            if choice is None or sampled is None:  # no token: a root, or a part of a prompt
                self._settle_root(sequence, report)
            elif (output := choice.take_plain(sampled.token_id)) is not None:
                outputs.append(output)
            else:
                self._take_special(choice, sampled, report)

    def _take_special(self, choice: Choice, sampled: Sampled, report: StepReport) -> None:
        """A token that may be more than its text, or end the answer."""
        number = choice.sequence.num_tokens
        text = choice.accept(sampled.token_id)
        report.outputs.append(self._output(choice, sampled, number, text))
        if choice.finish_reason is not None or choice.is_held_next:
            self._end_or_hold(choice, report)

    def _output(self, choice: Choice, sampled: Sampled, number: int, text: str) -> TokenOutput:
        """Of a token with more to say than most."""
        sequence = choice.sequence
        scores = sequence.group.scores if number == 0 else None
        return TokenOutput(
            key=choice.key,
            index=choice.index,
            number=number,
            token_id=sampled.token_id,
            text=text,
            finish_reason=choice.finish_reason,
            logprob=self._vocabulary.logprob(sampled) if choice.wants_logprob else None,
            prompt_logprobs=None if scores is None else scores.logprobs(self._vocabulary),
        )

    def _end_or_hold(self, choice: Choice, report: StepReport) -> None:
        """It has ended, or all its tokens that are to come from here."""
        sequence = choice.sequence
        active = self._requests[sequence.group.key]
        choice.has_sampled = True
        if choice.finish_reason is not None or active.group.root is not None:
            self.scheduler.remove(sequence)  # the blocks of the root are what will be held
        else:
            self.scheduler.park(sequence)  # its own are
        self._settle(active, report)

    def _settle_root(self, sequence: Sequence, report: StepReport) -> None:
        """The prompt of a request may be computed for which that alone is held."""
        active = self._requests.get(sequence.group.key)
        if active is not None and active.request.hold_after_first:
            self._settle(active, report)

    def _settle(self, active: ActiveRequest, report: StepReport) -> None:
        """Report the request's end, or that it is held, when this step brought it."""
        if active.is_finished:
            report.finished.append(active.finished())
            self.release(active.key)
        elif active.can_be_held:
            self._hold(active, report)

    def _hold(self, active: ActiveRequest, report: StepReport) -> None:
        held = active.hold()
        try:
            self.runner.export_blocks(held.blocks)
        except Exception as error:
            _log.error("block_export_failed", key=active.key, exc_info=True)
            self._fail(active, error, report)
        else:
            report.held.append(held)

    def _fail(self, active: ActiveRequest, error: Exception, report: StepReport) -> None:
        self.release(active.key)
        message = f"{type(error).__name__}: {error}"
        report.failed.append(FailedRequest(key=active.key, message=message))

    # ---- facts ---------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether ``step`` would compute or report something."""
        scheduler = self.scheduler
        can_run = bool(scheduler.running or scheduler.waiting) and not self._is_stalled
        arrivals = scheduler.reuse.arrivals
        return bool(self._ended) or can_run or (arrivals is not None and arrivals.has_ended)

    def load(self) -> Load:
        """How busy it is. A sequence whose KV is on its way into reserved blocks counts as running:
        nobody else would tell of it until it has come."""
        scheduler = self.scheduler
        arriving = self._reservations.values()
        unready = sum(len(active.group.pending) for active in self._requests.values())
        num_running = len(scheduler.running) + len(arriving)
        num_waiting = len(scheduler.waiting) + unready
        decoding = [s for s in scheduler.running if s.is_decoding]
        to_compute = [*scheduler.waiting, *(s for s in scheduler.running if not s.is_decoding)]
        return Load(
            num_running=num_running,
            num_waiting=num_waiting,
            num_free_slots=max(0, self.config.max_num_sequences - num_running - num_waiting),
            num_blocks=self.blocks.num_blocks,
            num_free_blocks=self.blocks.num_available,
            waiting_tokens=sum(sequence.num_uncomputed_tokens for sequence in to_compute),
            waiting_ms=self._waiting_ms(to_compute),
            context_tokens=sum(len(sequence.token_ids) for sequence in decoding)
            + sum(map(len, arriving)) * self.info.block_size,
        )

    def _waiting_ms(self, to_compute: list[Sequence]) -> float:
        """How long it takes to compute these, in steps as full as may be; what the pool has of them
        takes nothing, and the last token after that is a decode."""
        costs = self.meter.costs
        if costs is None:
            return 0.0
        num_tokens = num_squares = 0
        for sequence in to_compute:
            start, end = self.scheduler.reuse.num_found(sequence), len(sequence.token_ids)
            if end - start > 1 or not start:
                num_tokens += end - start
                num_squares += chunk_squares(start, end)
        num_steps = -(-num_tokens // self.config.max_batch_tokens)
        return prefill_step_ms(costs, num_tokens, num_squares, num_steps=num_steps)

    def block_states(self) -> BlockStates:
        """What its blocks are there for."""
        arrivals = self.scheduler.reuse.arrivals
        arriving: Iterable[int] = () if arrivals is None else arrivals.blocks()
        return block_states(self.blocks, self._requests.values(), arriving)

    def check_invariants(self) -> None:
        """Raise AssertionError when a block is not accounted for, or a sequence is in no line or
        in two."""
        check_books(self.blocks, self.scheduler, self._requests, self._reservations)
