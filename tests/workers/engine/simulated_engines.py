"""Small simulated engines, and an oracle of what they must answer."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import cache

from infra.transport.shm import SharedPool
from pipeline.cost_model import FREE
from schemas.requests import SamplingParams
from schemas.tokens import TokenLogprob
from tests.tiny_tokenizer import EOS_TOKEN_ID, tiny_tokenizer
from workers.engine.api import (
    EngineInfo,
    EngineRequest,
    Runner,
    Sampled,
    ScheduledSequence,
    StepReport,
)
from workers.engine.engine import Engine, EngineConfig
from workers.engine.output import Vocabulary
from workers.engine.prompt_scores import PromptScores
from workers.engine.simulated import ENTRY_BYTES, SimulatedRunner, readable_token_ids

BLOCK_SIZE = 4
CONTEXT_LENGTH = 96
PROMPT = (10, 11, 12, 13, 14)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tiny_tokenizer())


@cache
def answer_ids() -> tuple[int, ...]:
    return tuple(readable_token_ids(vocabulary()))


def info_of(num_blocks: int) -> EngineInfo:
    return EngineInfo(
        kind="simulated",
        context_length=CONTEXT_LENGTH,
        vocab_size=vocabulary().size,
        eos_token_ids=frozenset({EOS_TOKEN_ID}),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        block_bytes=BLOCK_SIZE * ENTRY_BYTES,
        fingerprint="test",
    )


class StrictRunner(SimulatedRunner):
    """A simulated runner that also insists on what ``ScheduledSequence`` promises."""

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        written: set[tuple[int, int]] = set()
        for scheduled in batch:
            start, end = scheduled.start, scheduled.start + scheduled.count
            assert 0 <= start < end <= len(scheduled.token_ids)
            assert end <= len(scheduled.block_table) * BLOCK_SIZE
            assert not scheduled.sample or end == len(scheduled.token_ids)
            slots = {
                (scheduled.block_table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(start, end)
            }
            assert not slots & written, "two sequences write to one place"
            written |= slots
        return super().execute(batch)


def make_runner(pool: SharedPool) -> SimulatedRunner:
    return SimulatedRunner(pool, info_of(pool.num_blocks), answer_ids(), FREE)


def make_engine(
    num_blocks: int = 64,
    *,
    max_batch_tokens: int = 16,
    max_num_sequences: int = 8,
    num_host_blocks: int = 0,
    runner_class: type[SimulatedRunner] = StrictRunner,
) -> Engine:
    """``num_host_blocks``: what its memory has for a host tier, which it does not use by itself."""
    pool = SharedPool(num_blocks + num_host_blocks, BLOCK_SIZE * ENTRY_BYTES)
    runner: Runner = runner_class(pool, info_of(num_blocks), answer_ids(), FREE)
    config = EngineConfig(max_batch_tokens=max_batch_tokens, max_num_sequences=max_num_sequences)
    return Engine(runner, pool, vocabulary(), config)


@contextmanager
def engines(*made: Engine) -> Iterator[None]:
    """At the end the books are right and no block is held."""
    yield
    for engine in made:
        engine.check_invariants()
        assert engine.blocks.counts().active == 0


def run(engine: Engine, *, most_steps: int = 2000) -> StepReport:
    """All steps until there is no work, as one report."""
    total = StepReport()
    for _ in range(most_steps):
        if not engine.has_work():
            return total
        report = engine.step()
        engine.check_invariants()
        total.outputs += report.outputs
        total.held += report.held
        total.finished += report.finished
        total.failed += report.failed
        total.num_computed_tokens += report.num_computed_tokens
    raise AssertionError("the engine found no end")


def tokens_of(report: StepReport, key: str, index: int = 0) -> list[int]:
    return [o.token_id for o in report.outputs if o.key == key and o.index == index]


def text_of(report: StepReport, key: str, index: int = 0) -> str:
    return "".join(o.text for o in report.outputs if o.key == key and o.index == index)


def request_of(
    key: str, prompt_ids: tuple[int, ...] = (10, 11, 12, 13, 14), **fields: object
) -> EngineRequest:
    """A request; fields of SamplingParams and of EngineRequest by name."""
    own = {
        name: fields.pop(name) for name in list(fields) if name in EngineRequest.__struct_fields__
    }
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 12, **fields})  # type: ignore[arg-type]
    return EngineRequest(key=key, prompt_ids=prompt_ids, sampling=sampling, **own)  # type: ignore[arg-type]


@cache
def _oracle() -> SimulatedRunner:
    return make_runner(SharedPool(CONTEXT_LENGTH, BLOCK_SIZE * ENTRY_BYTES))


def expected_answer(
    prompt_ids: tuple[int, ...], sampling: SamplingParams, index: int = 0
) -> tuple[list[int], str]:
    """Tokens and finish reason of one choice computed alone, from scratch for every token: no
    engine, no scheduler, no sharing. Without stop strings."""
    ids = list(prompt_ids)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS_TOKEN_ID})
    assert sampling.max_tokens is not None
    while True:
        whole = ScheduledSequence(
            token_ids=ids,
            num_prompt_tokens=len(prompt_ids),
            block_table=range(CONTEXT_LENGTH),
            start=0,
            count=len(ids),
            sample=True,
            sampling=sampling,
            index=index,
        )
        ids.append(_oracle().execute([whole])[0].token_id)
        tokens = ids[len(prompt_ids) :]
        if ids[-1] in ends and len(tokens) > sampling.min_tokens:
            return tokens, "stop"
        if len(tokens) == sampling.max_tokens or len(ids) == CONTEXT_LENGTH:
            return tokens, "length"


def expected_scores(prompt_ids: tuple[int, ...], num_top: int) -> tuple[TokenLogprob, ...]:
    """A prompt's logprobs, computed alone and in one step."""
    scores = PromptScores(prompt_ids)
    whole = ScheduledSequence(
        token_ids=prompt_ids,
        num_prompt_tokens=len(prompt_ids),
        block_table=range(CONTEXT_LENGTH),
        start=0,
        count=len(prompt_ids),
        sample=False,
        sampling=SamplingParams(prompt_logprobs=num_top),
        index=0,
        scores=scores,
    )
    _oracle().execute([whole])
    return scores.logprobs(vocabulary())


def copy_blocks(source: Engine, held: tuple[int, ...], target: Engine, to: tuple[int, ...]) -> None:
    """What a transport does: bytes from slot to slot."""
    for here, there in zip(held, to, strict=True):
        target.pool.slots[there] = source.pool.slots[here]


def answer_of(
    prompt_ids: tuple[int, ...] = PROMPT, index: int = 0, **sampling: object
) -> list[int]:
    """The tokens of :func:`expected_answer`, to a prompt that many tests use."""
    fields = {"seed": 1, "max_tokens": 12, **sampling}
    return expected_answer(prompt_ids, SamplingParams(**fields), index)[0]  # type: ignore[arg-type]
