"""The real engine on a clock of its own, and the simulated one, given the same requests."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random

from infra.transport.shm import SharedPool
from loadgen.simulate.engine import VirtualEngine
from loadgen.simulate.holdings import EngineSpec
from loadgen.simulate.prompts import piece_names
from loadgen.simulate.sequence import Sequence
from loadgen.traces import TraceEntry
from pipeline.cost_model import FREE
from schemas.profiles import StepCosts
from schemas.requests import SamplingParams
from tests.workers.engine.simulated_engines import BLOCK_SIZE, answer_ids, vocabulary
from workers.engine.api import EngineInfo, EngineRequest, Sampled, ScheduledSequence
from workers.engine.engine import Engine, EngineConfig
from workers.engine.line import place_in_line
from workers.engine.simulated import ENTRY_BYTES, SimulatedRunner, batch_ms

BLOCKS_PER_PIECE = 4
PIECE = BLOCKS_PER_PIECE * BLOCK_SIZE
COSTS = StepCosts(
    prefill_base_ms=3.0,
    prefill_token_ms=0.2,
    prefill_square_ms=0.001,
    decode_base_ms=5.0,
    decode_context_ms=0.01,
    decode_sequence_ms=0.3,
)

Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Job:
    """A request: which pieces its prompt is made of, and how long prompt and answer are."""

    due_s: float
    hash_ids: tuple[int, ...]
    num_prompt: int
    num_output: int
    overtakes: bool = False


class _TimedRunner(SimulatedRunner):
    """Says how long its last step would have taken, instead of taking it."""

    last_ms = 0.0

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        self.last_ms = batch_ms(COSTS, batch)
        return super().execute(batch)


def run_real(
    jobs: Seq[Job], num_blocks: int, max_batch_tokens: int, max_num_sequences: int
) -> tuple[Times, dict[str, int]]:
    """When the real engine brought each token, by request, and how much of each prompt it found."""
    pool = SharedPool(num_blocks, BLOCK_SIZE * ENTRY_BYTES)
    info = EngineInfo(
        kind="simulated",
        context_length=100_000,
        vocab_size=vocabulary().size,
        eos_token_ids=frozenset(),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        block_bytes=BLOCK_SIZE * ENTRY_BYTES,
        fingerprint="test",
    )
    runner = _TimedRunner(pool, info, answer_ids(), FREE)
    config = EngineConfig(max_batch_tokens=max_batch_tokens, max_num_sequences=max_num_sequences)
    engine = Engine(runner, pool, vocabulary(), config)
    times: Times = defaultdict(list)
    cached: dict[str, int] = {}
    now_s, left = 0.0, sorted(enumerate(jobs), key=lambda one: one[1].due_s)
    while left or engine.has_work():
        if not engine.has_work():
            now_s = max(now_s, left[0][1].due_s)
        while left and left[0][1].due_s <= now_s:
            number, job = left.pop(0)
            engine.add(_request(number, job))
        report = engine.step()
        now_s += runner.last_ms / 1e3
        for output in report.outputs:
            times[output.key].append(now_s)
        for finished in report.finished:
            cached[finished.key] = finished.num_cached_tokens
    engine.check_invariants()
    pool.close()
    return times, cached


def _request(number: int, job: Job) -> EngineRequest:
    ids: list[int] = []
    for place in range(-(-job.num_prompt // PIECE)):
        shared = job.hash_ids[place] if place < len(job.hash_ids) else f"{number}.{place}"
        rng = Random(f"piece {shared}")
        ids += [rng.randrange(vocabulary().size) for _ in range(PIECE)]
    return EngineRequest(
        key=str(number),
        prompt_ids=tuple(ids[: job.num_prompt]),
        salt=b"salt",
        sampling=SamplingParams(
            seed=1,
            temperature=0.0,
            max_tokens=job.num_output,
            min_tokens=job.num_output,
            ignore_eos=True,
        ),
        overtakes=job.overtakes,
    )


def run_virtual(
    jobs: Seq[Job], num_blocks: int, max_batch_tokens: int, max_num_sequences: int
) -> tuple[Times, dict[str, int], VirtualEngine]:
    """The same of the simulated engine, and the engine, whose books were checked at each end."""
    spec = EngineSpec(
        costs=COSTS,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        blocks_per_piece=BLOCKS_PER_PIECE,
        max_num_sequences=max_num_sequences,
        max_batch_tokens=max_batch_tokens,
    )
    engine = VirtualEngine(spec)
    sequences = [_sequence(number, job) for number, job in enumerate(jobs)]
    due = [(job.due_s, number) for number, job in enumerate(jobs)]
    heapq.heapify(due)
    end_s: float | None = None
    while due or end_s is not None:
        if end_s is not None and (not due or end_s <= due[0][0]):
            now_s = end_s
            engine.finish()
            engine.check_invariants()
            while due and due[0][0] <= now_s:
                engine.enqueue(sequences[heapq.heappop(due)[1]])
            end_s = engine.start(now_s)
            continue
        now_s, number = heapq.heappop(due)
        engine.enqueue(sequences[number])
        while due and due[0][0] <= now_s:
            engine.enqueue(sequences[heapq.heappop(due)[1]])
        end_s = engine.cut(now_s) if engine.is_running else engine.start(now_s)
    return (
        {sequence.key: _token_times(sequence) for sequence in sequences},
        {sequence.key: sequence.num_cached for sequence in sequences},
        engine,
    )


def _sequence(number: int, job: Job) -> Sequence:
    entry = TraceEntry(
        timestamp=0, input_length=job.num_prompt, output_length=1, hash_ids=job.hash_ids
    )
    return Sequence(
        key=str(number),
        age=place_in_line(number, overtakes=job.overtakes),
        overtakes=job.overtakes,
        pieces=piece_names(entry, number, -(-job.num_prompt // PIECE), b"salt"),
        num_prompt=job.num_prompt,
        num_output=job.num_output,
        holds=False,
    )


def _token_times(sequence: Sequence) -> list[float]:
    times: list[float] = []
    for segment in sequence.segments:
        if isinstance(segment, float):
            times.append(segment)
        else:
            log, first, end = segment
            times += log.ends_s()[first:end].tolist()
    return times
