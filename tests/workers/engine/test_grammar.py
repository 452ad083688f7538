"""Answers with a ``response_format`` in simulated engines: what may be said, and where they end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from schemas.errors import EngineFailed, InvalidRequest
from schemas.requests import ResponseFormat, SamplingParams
from tests.tiny_tokenizer import EOS_TOKEN_ID, tiny_tokenizer
from tests.workers.engine.simulated_engines import (
    copy_blocks,
    engines,
    info_of,
    make_engine,
    request_of,
    run,
    text_of,
    tokens_of,
    vocabulary,
)
from tests.workers.engine.test_sampler import row
from workers.engine import grammar
from workers.engine.api import EngineInfo
from workers.engine.engine import Engine
from workers.engine.grammar import Grammars, Matcher
from workers.engine.output import Vocabulary
from workers.engine.penalties import adjust_logits
from workers.engine.sampler import sample

PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "tame": {"type": "boolean"},
    },
    "required": ["kind", "legs", "tame"],
    "additionalProperties": False,
}
TOKENIZER = tiny_tokenizer()
EOS = frozenset({EOS_TOKEN_ID})


NO_END = replace(info_of(4), eos_token_ids=frozenset())


def schema(of: object) -> ResponseFormat:
    return ResponseFormat(kind="json_schema", json_schema=json.dumps(of))


ANIMAL = schema(PERSON)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def matcher_of(
    wanted: ResponseFormat, *, info: EngineInfo | None = None, **more: object
) -> Matcher:
    grammars = Grammars(vocabulary(), info or info_of(4))
    made = grammars.matcher(SamplingParams(response_format=wanted, **more))  # type: ignore[arg-type]
    assert made is not None
    return made


def allowed_ids(matcher: Matcher) -> set[int]:
    bits = int.from_bytes(matcher.allowed(), "little")
    return {token_id for token_id in range(bits.bit_length()) if bits >> token_id & 1}


def spell(matcher: Matcher, text: str) -> None:
    for token_id in ids_of(text):
        assert token_id in allowed_ids(matcher)
        matcher.accept(token_id)


# ---- the matcher ---------------------------------------------------------------------------


def test_an_end_is_allowed_where_the_grammar_may_end() -> None:
    """A number may end after any digit, and go on; not before the first."""
    matcher = matcher_of(schema({"type": "integer"}))
    assert EOS_TOKEN_ID not in allowed_ids(matcher)
    spell(matcher, "1")
    assert allowed_ids(matcher) >= {EOS_TOKEN_ID, *ids_of("0")}
    assert not matcher.is_complete
    spell(matcher, "2")
    assert EOS_TOKEN_ID in allowed_ids(matcher)


def test_nothing_may_follow_a_complete_object() -> None:
    """The brace that closes it completes the answer: no eos is needed for that."""
    matcher = matcher_of(ANIMAL)
    spell(matcher, '{"kind": "cat", "legs": 4, "tame": true')
    assert not matcher.is_complete
    spell(matcher, "}")
    assert matcher.is_complete


@pytest.mark.parametrize(
    "matcher",
    [
        matcher_of(schema({"type": "integer"}), ignore_eos=True),
        matcher_of(schema({"type": "integer"}), info=NO_END),
    ],
    ids=["ignore_eos", "no_eos"],
)
def test_an_end_that_would_not_end_is_never_allowed(matcher: Matcher) -> None:
    """With ``ignore_eos``, and in models without an end token, the grammar goes on while it can."""
    spell(matcher, "12")
    assert not allowed_ids(matcher) & {0, 1, EOS_TOKEN_ID}
    assert not matcher.is_complete


def test_a_token_that_does_not_fit_is_an_error_of_this_answer() -> None:
    """Tokens of a predecessor that kept to no format can't be gone on from: said, not ignored."""
    matcher = matcher_of(ANIMAL)
    matcher.accept(ids_of("x")[0])
    assert not matcher.is_complete
    with pytest.raises(EngineFailed, match="response_format"):
        matcher.allowed()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_matcher_is_a_function_of_its_tokens(data: st.DataObject) -> None:
    """Step by step or all at once, asked in between or not: the same is allowed."""
    walked, tokens = matcher_of(ANIMAL), []
    while not walked.is_complete and len(tokens) < 30:
        tokens.append(data.draw(st.sampled_from(sorted(allowed_ids(walked)))))
        walked.accept(tokens[-1])
    jumped = matcher_of(ANIMAL)
    for token_id in tokens:
        jumped.accept(token_id)
    assert jumped.is_complete == walked.is_complete
    assert jumped.allowed() == walked.allowed()


def test_grammars_are_compiled_once_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers of one format share what was compiled; the number that is kept is bounded."""
    monkeypatch.setattr(grammar, "MAX_GRAMMARS", 2)
    compiled: list[ResponseFormat] = []
    compile_one = grammar.grammar_of
    monkeypatch.setattr(
        grammar, "grammar_of", lambda wanted: (compiled.append(wanted), compile_one(wanted))[1]
    )
    grammars = Grammars(vocabulary(), info_of(4))
    first, second, third = (schema({"const": number}) for number in range(3))
    for wanted in (first, second, first, third, first, second):
        grammars.prepare(wanted)
    assert compiled == [first, second, third, second]


def test_a_tokenizer_that_can_not_be_used_is_said() -> None:
    """Such a model serves all else; a request with a format is the caller's to change."""

    class Odd(Vocabulary):
        def to_json(self) -> str:
            return '{"model": {"type": "none of those"}}'

    grammars = Grammars(Odd(TOKENIZER), info_of(4))
    grammars.load()
    assert grammars.matcher(SamplingParams()) is None
    with pytest.raises(InvalidRequest) as caught:
        grammars.prepare(ANIMAL)
    assert caught.value.param == "response_format"


# ---- the mask ------------------------------------------------------------------------------


def mask(*ids: int) -> bytes:
    return sum(1 << token_id for token_id in ids).to_bytes(8, "little")


def test_only_allowed_tokens_are_drawn_and_listed() -> None:
    """Bias and penalties come before the mask and do not lift it; alternatives are allowed ones,
    with probabilities among these."""
    logits = torch.arange(64.0)[None]
    for sampling in ({"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {}):
        one = structs.replace(
            row(logit_bias={40: 100.0}, logprobs=5, **sampling), allowed=mask(3, 9)
        )
        (got,) = sample(logits, [one], frozenset())
        assert got.token_id == 9
        assert [token_id for token_id, _ in got.top] == [9, 3]
        assert sum(torch.tensor([logprob for _, logprob in got.top]).exp()) == pytest.approx(1)


def test_many_allowed_tokens_are_kept_as_few_are() -> None:
    """Both ways of masking leave what is allowed as it was, and nothing else."""
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(2))
    many, few = bytearray(b"\xff" * 600), bytearray(b"\x11" * 100)
    rows = [structs.replace(row(), allowed=bytes(bits)) for bits in (many, few)]
    got = adjust_logits(logits, rows, EOS)
    for number, ids in enumerate((range(4800), [i for i in range(800) if i % 4 == 0])):
        expected = torch.full((5000,), -torch.inf)
        expected[list(ids)] = logits[number][list(ids)]
        assert torch.equal(got[number], expected)


def test_rows_without_a_mask_are_not_touched() -> None:
    """Bit for bit what they are without a masked row beside them."""
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1))
    free = [row(seed=n, top_k=(0, 300)[n % 2], logprobs=3) for n in range(5)]
    masked = structs.replace(row(seed=9), allowed=mask(1, 2))
    beside = sample(logits, [*free, masked], EOS)
    assert beside[:5] == sample(logits[:5], free, EOS)
    assert beside[5].token_id in (1, 2)


def test_ends_that_come_too_early_yield_to_the_grammar() -> None:
    """``min_tokens`` forbids ends and stop ids while anything else is allowed, no longer."""
    logits = torch.zeros(1, 64)
    early = {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": (3,)}
    other = structs.replace(row(**early), allowed=mask(2, 3, 7))
    assert sample(logits, [other], EOS)[0].token_id == 7
    only = structs.replace(row(**early), allowed=mask(3))
    assert sample(logits, [only], EOS)[0].token_id == 3


def test_a_mask_without_a_token_of_the_model_is_an_error() -> None:
    """Never a draw from nothing."""
    none = structs.replace(row(), allowed=mask(63))
    with pytest.raises(EngineFailed, match="allows no token"):
        sample(torch.zeros(1, 50), [none], EOS)


# ---- the engine ----------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine()
    with engines(made):
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_keep_to_their_schema(engine: Engine, temperature: float) -> None:
    """Every choice is JSON that the schema allows, ends with "stop" and without an eos; a free
    request beside them says what it says alone."""
    for number in range(4):
        engine.add(
            request_of(
                f"animal-{number}",
                (20 + number,),
                n=2,
                seed=number,
                temperature=temperature,
                max_tokens=60,
                response_format=ANIMAL,
            )
        )
    engine.add(request_of("free"))
    report = run(engine)
    answers = {
        text_of(report, f"animal-{number}", index) for number in range(4) for index in range(2)
    }
    for answer in answers:
        jsonschema.validate(json.loads(answer), PERSON)
    assert len(answers) > 2
    ends = {finished.key: finished.finish_reasons for finished in report.finished}
    assert all(ends[f"animal-{number}"] == ("stop", "stop") for number in range(4))
    assert EOS_TOKEN_ID not in tokens_of(report, "animal-0")
    alone = make_engine()
    alone.add(request_of("free"))
    assert tokens_of(report, "free") == tokens_of(run(alone), "free")


def test_json_mode_gives_any_object(engine: Engine) -> None:
    """``json_object``: an object, of whatever."""
    wanted = ResponseFormat(kind="json_object")
    for seed in range(6):
        engine.add(request_of(str(seed), seed=seed, max_tokens=80, response_format=wanted))
    report = run(engine)
    ended = [f.key for f in report.finished if f.finish_reasons == ("stop",)]
    assert len(ended) >= 4
    assert all(isinstance(json.loads(text_of(report, key)), dict) for key in ended)


def test_an_answer_that_is_too_short_for_its_schema_ends_with_length(engine: Engine) -> None:
    """The client sees that it is cut: "length", and the beginning of the JSON."""
    engine.add(request_of("a", max_tokens=5, response_format=ANIMAL))
    report = run(engine)
    assert report.finished[0].finish_reasons == ("length",)
    assert text_of(report, "a").startswith("{")


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 50}])
def test_a_complete_answer_ends_whatever_else_is_asked(
    engine: Engine, more: dict[str, int]
) -> None:
    """``ignore_eos`` and ``min_tokens`` can't make a closed object go on."""
    engine.add(request_of("a", max_tokens=60, response_format=ANIMAL, **more))
    report = run(engine)
    jsonschema.validate(json.loads(text_of(report, "a")), PERSON)
    assert report.finished[0].finish_reasons == ("stop",)


def test_min_tokens_and_ignore_eos_hold_while_the_grammar_can_go_on(engine: Engine) -> None:
    """A number grows until ``min_tokens`` is reached, and with ``ignore_eos`` to its length."""
    number = schema({"type": "integer", "minimum": 1})
    engine.add(request_of("min", min_tokens=9, max_tokens=60, seed=3, response_format=number))
    engine.add(request_of("ignore", ignore_eos=True, max_tokens=20, response_format=number))
    report = run(engine)
    assert len(tokens_of(report, "min")) >= 9
    assert len(tokens_of(report, "ignore")) == 20
    assert isinstance(json.loads(text_of(report, "min")), int)


def test_any_prefix_can_be_taken_over() -> None:
    """Given the first k tokens of an answer, for every k: another engine's tokens and text are the
    rest of it, also when all were there and only the end was missing."""
    undisturbed = make_engine()
    request = request_of("a", n=2, max_tokens=60, response_format=ANIMAL)
    undisturbed.add(request)
    report = run(undisturbed)
    whole = [tokens_of(report, "a", index) for index in range(2)]
    for count in range(max(map(len, whole)) + 1):
        tokens = tuple(tuple(ids[:count]) for ids in whole)
        successor = make_engine()
        with engines(successor):
            successor.add(structs.replace(request, tokens=tokens))
            rest = run(successor)
        assert [[*had, *tokens_of(rest, "a", i)] for i, had in enumerate(tokens)] == whole
        assert rest.finished[0].finish_reasons == ("stop", "stop")


def test_an_answer_goes_on_after_its_hand_over() -> None:
    """Prefill samples the first token under the mask, decode replays it and goes on: the answer is
    that of one engine. In chunks of 16 tokens, prompt longer than that."""
    prompt = tuple(range(10, 50))
    request = request_of("a", prompt, max_tokens=50, response_format=ANIMAL)
    alone, prefill, decode = (make_engine() for _ in range(3))
    alone.add(request)
    expected = tokens_of(run(alone), "a")
    with engines(prefill, decode):
        prefill.add(structs.replace(request, hold_after_first=True))
        report = run(prefill)
        (held,) = report.held
        first = tokens_of(report, "a")
        blocks = decode.reserve("a", held.num_tokens)
        assert blocks is not None
        copy_blocks(prefill, held.blocks, decode, blocks)
        prefill.release("a")
        decode.add(
            structs.replace(
                request,
                tokens=(tuple(first),),
                imported_blocks=blocks,
                num_imported_tokens=held.num_tokens,
            )
        )
        assert [*first, *tokens_of(run(decode), "a")] == expected


def test_a_preempted_answer_keeps_its_place_in_the_grammar() -> None:
    """A pool too small for all sets sequences back; their answers stay the same."""
    alone, crowded = make_engine(), make_engine(num_blocks=14)
    requests = [
        request_of(str(n), tuple(range(10 + n, 22 + n)), max_tokens=25, response_format=ANIMAL)
        for n in range(4)
    ]
    with engines(alone, crowded):
        for request in requests:
            crowded.add(request)
        together = run(crowded)
        assert crowded.scheduler.num_preemptions > 0
        for request in requests:
            alone.add(request)
            assert tokens_of(run(alone), request.key) == tokens_of(together, request.key)


def test_tokens_that_break_the_format_fail_their_request_alone(engine: Engine) -> None:
    """The books stay right, and others go on."""
    engine.add(
        request_of("broken", tokens=((ids_of("x")[0],),), response_format=ANIMAL, max_tokens=60)
    )
    engine.add(request_of("good", response_format=ANIMAL, max_tokens=60))
    report = run(engine)
    assert [failed.key for failed in report.failed] == ["broken"]
    assert "response_format" in report.failed[0].message
    jsonschema.validate(json.loads(text_of(report, "good")), PERSON)


def test_a_schema_that_does_not_compile_is_refused_at_add(engine: Engine) -> None:
    """Whatever admission let through: named, and nothing is queued."""
    bad = schema({"type": "thing"})
    with pytest.raises(InvalidRequest) as caught:
        engine.prepare(SamplingParams(response_format=bad))
    assert caught.value.param == "response_format"
    with pytest.raises(InvalidRequest):
        engine.add(request_of("a", response_format=bad))
    assert not engine.has_work()
