"""How likely a prompt's own tokens are: on every path, however the prompt comes to be computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from schemas.requests import SamplingParams
from schemas.tokens import TokenLogprob
from tests.tiny_models import VOCAB_SIZE
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.device.device_engines import staged_engine
from tests.workers.engine.simulated_engines import (
    copy_blocks,
    engines,
    expected_scores,
    make_engine,
    request_of,
    run,
    tokens_of,
)
from tests.workers.engine.torch_engines import (
    generate,
    prompts,
    reference_model,
    small_engine,
)
from workers.engine.api import EngineRequest, StepReport
from workers.engine.engine import Engine

PROMPT = tuple(range(10, 31))  # five blocks and a token of the sixth
KERNELS = ("general", "native")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def scores_of(report: StepReport, key: str, index: int = 0) -> tuple[TokenLogprob, ...]:
    """Those that came with token 0; no other token brings any."""
    outputs = [o for o in report.outputs if (o.key, o.index) == (key, index)]
    assert [o.number for o in outputs if o.prompt_logprobs is not None] == [0]
    found = outputs[0].prompt_logprobs
    assert found is not None
    return found


def asked(
    key: str, prompt: Sequence[int], *, num_top: int = 2, max_tokens: int = 3, n: int = 1
) -> EngineRequest:
    sampling = SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=num_top,
        prompt_logprobs=num_top,
        logit_bias={int(prompt[-1]): 50.0},  # of answers, not of what the prompt says
        n=n,
    )
    return EngineRequest(key=key, prompt_ids=tuple(prompt), sampling=sampling)


# ---- against transformers ------------------------------------------------------------------


class Reference:
    """``log_softmax`` of transformers' logits, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model = reference_model(folder)

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], got: Sequence[TokenLogprob], num_top: int) -> None:
        """``got`` has the prompt's tokens, their logprobs and the likeliest at each place."""
        assert [one.token_id for one in got] == list(prompt)
        assert (got[0].logprob, got[0].top) == (0.0, ())
        logprobs = self.model(torch.tensor([list(prompt)])).logits[0].log_softmax(-1)
        for row, one in zip(logprobs, got[1:], strict=False):
            top = row.topk(num_top)
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=2e-4)
            assert [other.logprob for other in one.top] == pytest.approx(
                top.values.tolist(), abs=2e-4
            )
            for other in one.top:
                assert other.logprob == pytest.approx(float(row[other.token_id]), abs=2e-4)


@pytest.mark.parametrize("kernels", [*KERNELS, "device"])
def test_scores_are_log_softmax_of_transformers(kernels: str, tiny_folder: TinyFolder) -> None:
    """Prompts in several chunks and in one, beside running answers; one whose beginning is in the
    cache, which gives no scores and is not used; two choices; one token alone. Prompts that ask
    for nothing get nothing, and what was computed for scores is shared as ever."""
    folder = tiny_folder("llama")
    reference = Reference(folder)
    engine = staged_engine(folder) if kernels == "device" else small_engine(folder, kernels=kernels)
    plain, long, short, one = prompts((30, 37, 5, 1), vocab_size=VOCAB_SIZE)
    known = plain[:24] + short
    engine.add(EngineRequest(key="plain", prompt_ids=plain, sampling=_greedy(12)))
    first = _steps(engine, 5)
    for key, prompt, n in (("long", long, 1), ("short", short, 1), ("known", known, 1),
                           ("two", long, 2), ("one", one, 1)):  # fmt: skip
        engine.add(asked(key, prompt, n=n))
    report = _merged(first, run(engine))
    for key, prompt, index in (("long", long, 0), ("short", short, 0), ("known", known, 0),
                               ("two", long, 0), ("two", long, 1), ("one", one, 0)):  # fmt: skip
        reference.check(prompt, scores_of(report, key, index), 2)
    assert not any(o.prompt_logprobs for o in report.outputs if o.key == "plain")
    assert tokens_of(report, "plain") == generate(reference.model, plain, 12)
    assert {f.key: f.num_cached_tokens for f in report.finished}["known"] == 0
    engine.add(EngineRequest(key="again", prompt_ids=long, sampling=_greedy(2)))
    assert run(engine).finished[0].num_cached_tokens == 36


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_small_pool_preempts_and_the_scores_stay(kernels: str, tiny_folder: TinyFolder) -> None:
    """Set back within their prompts, sequences compute it again from its beginning."""
    folder = tiny_folder("llama")
    reference = Reference(folder)
    engine = small_engine(folder, kernels=kernels, num_blocks=24)
    asking = prompts((21, 25, 37, 33, 18), vocab_size=VOCAB_SIZE, seed=2)
    for number, prompt in enumerate(asking):
        engine.add(asked(str(number), prompt, num_top=1, max_tokens=20))
    report = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for number, prompt in enumerate(asking):
        reference.check(prompt, scores_of(report, str(number)), 1)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2"])
def test_other_architectures(architecture: str, tiny_folder: TinyFolder) -> None:
    """Soft-capped logits, and a head that computes all rows anyway."""
    folder = tiny_folder(architecture)
    engine = small_engine(folder)
    (prompt,) = prompts((29,), vocab_size=VOCAB_SIZE)
    engine.add(asked("a", prompt, num_top=3))
    Reference(folder).check(prompt, scores_of(run(engine), "a"), 3)


def test_the_answer_does_not_change(tiny_folder: TinyFolder) -> None:
    """Asked for scores or not: the same tokens and logprobs, bit for bit."""
    engine = small_engine(tiny_folder("llama"), kernels="native")
    (prompt,) = prompts((30,), vocab_size=VOCAB_SIZE)
    found = []
    for key, num_top in (("scored", 2), ("plain", None)):
        sampling = SamplingParams(
            temperature=0.0, seed=0, max_tokens=8, logprobs=2, prompt_logprobs=num_top
        )
        engine.add(EngineRequest(key=key, prompt_ids=prompt, sampling=sampling))
        found.append([(o.token_id, o.logprob) for o in run(engine).outputs])
    assert found[0] == found[1]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)


def _steps(engine: Engine, times: int) -> StepReport:
    return _merged(*(engine.step() for _ in range(times)))


def _merged(*reports: StepReport) -> StepReport:
    total = StepReport()
    for report in reports:
        assert not report.failed, report.failed
        total.outputs += report.outputs
        total.finished += report.finished
    return total


# ---- the engine's books, simulated ---------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine()
    with engines(made):
        yield made
    made.pool.close()


@pytest.fixture
def wanted() -> tuple[TokenLogprob, ...]:
    """Of ``PROMPT``, computed alone."""
    return expected_scores(PROMPT, 3)


def test_simulated_scores_fit_simulated_answers(engine: Engine) -> None:
    """A greedy answer given back as a prompt is the likeliest at each place, as with a model."""
    engine.add(request_of("a", PROMPT, temperature=0.0, ignore_eos=True))
    answer = tokens_of(run(engine), "a")
    engine.add(request_of("b", (*PROMPT, *answer), prompt_logprobs=3))
    scores = scores_of(run(engine), "b")[len(PROMPT) :]
    assert [one.token_id for one in scores] == answer
    assert [one.top[0].token_id for one in scores] == answer
    assert {one.logprob for one in scores} == {-0.25}


@pytest.mark.parametrize("n", [1, 3])
def test_every_choice_brings_them(engine: Engine, wanted: tuple[TokenLogprob, ...], n: int) -> None:
    """With its token 0, also where the request is held after that."""
    engine.add(request_of("a", PROMPT, prompt_logprobs=3, n=n))
    engine.add(request_of("held", PROMPT, prompt_logprobs=3, n=n, hold_after_first=True))
    report = run(engine)
    for index in range(n):
        assert scores_of(report, "a", index) == scores_of(report, "held", index) == wanted
    engine.release("held")


def test_who_takes_over_repeats_none(engine: Engine, wanted: tuple[TokenLogprob, ...]) -> None:
    """Scores are out with token 0: a choice that has it gets none again, and the cache is used; one
    that has not gets its own."""
    engine.add(request_of("a", PROMPT))
    tokens = tokens_of(run(engine), "a")
    sampling = {"prompt_logprobs": 3}
    engine.add(request_of("b", PROMPT, tokens=(tuple(tokens[:2]),), **sampling))
    report = run(engine)
    assert [o.number for o in report.outputs] == list(range(2, len(tokens)))
    assert not any(o.prompt_logprobs for o in report.outputs)
    assert report.finished[0].num_cached_tokens == 20
    engine.add(request_of("c", PROMPT, n=2, tokens=(tuple(tokens[:2]), ()), **sampling))
    report = run(engine)
    assert not any(o.prompt_logprobs for o in report.outputs if o.index == 0)
    assert scores_of(report, "c", 1) == wanted


def test_blocks_that_came_give_no_scores(engine: Engine, wanted: tuple[TokenLogprob, ...]) -> None:
    """KV from elsewhere for a choice without its first token: the prompt is computed all the same,
    and the blocks go back."""
    other = make_engine()
    with engines(other):
        other.add(request_of("a", PROMPT, hold_after_first=True))
        (held,) = run(other).held
        blocks = engine.reserve("a", held.num_tokens)
        assert blocks is not None
        copy_blocks(other, held.blocks, engine, blocks)
        other.release("a")
    other.pool.close()
    imported = {"imported_blocks": blocks, "num_imported_tokens": held.num_tokens}
    engine.add(request_of("a", PROMPT, prompt_logprobs=3, **imported))
    assert scores_of(run(engine), "a") == wanted


def test_an_answer_of_nothing_hides_its_token(
    engine: Engine, wanted: tuple[TokenLogprob, ...]
) -> None:
    """``max_tokens`` 0: one token carries the scores, without text or logprob, and ends it."""
    engine.add(request_of("a", PROMPT, prompt_logprobs=3, logprobs=3, max_tokens=0, n=2))
    report = run(engine)
    assert [(o.text, o.logprob, o.finish_reason) for o in report.outputs] == [
        ("", None, "length")
    ] * 2
    assert scores_of(report, "a", 0) == scores_of(report, "a", 1) == wanted
    assert report.finished[0].num_tokens == (1, 1)
