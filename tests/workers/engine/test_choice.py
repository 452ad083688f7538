from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.requests import SamplingParams
from tests.tiny_tokenizer import EOS_TOKEN_ID, tiny_tokenizer
from tests.workers.engine.test_output import FALLBACK
from workers.engine.api import EngineInfo
from workers.engine.choice import Choice
from workers.engine.output import OutputProcessor, Vocabulary
from workers.engine.sequence import Group, Sequence

BYTE_LEVEL = Vocabulary(tiny_tokenizer())
INFO = EngineInfo(
    kind="simulated",
    context_length=4096,
    vocab_size=512,
    eos_token_ids=frozenset({EOS_TOKEN_ID}),
    block_size=16,
    num_blocks=64,
    block_bytes=128,
    fingerprint="",
)
IDS = st.lists(st.integers(0, 511), min_size=1, max_size=60)


def choice_of(vocabulary: Vocabulary, prompt_ids: list[int], sampling: SamplingParams) -> Choice:
    group = Group(key="a.1", place=0, sampling=sampling, salt=b"")
    sequence = Sequence(
        group=group, index=0, token_ids=list(prompt_ids), num_prompt_tokens=len(prompt_ids)
    )
    output = OutputProcessor(vocabulary, prompt_ids, sampling.stop, sampling.min_tokens)
    return Choice(sequence, output, sampling, INFO)


@pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, FALLBACK])
@settings(deadline=None, max_examples=60)
@given(ids=IDS, prompt_ids=st.lists(st.integers(0, 299), min_size=1, max_size=9))
@example(ids=[260, 97, 159, 97], prompt_ids=[97])
def test_each_token_shows_what_its_output_says(
    vocabulary: Vocabulary, ids: list[int], prompt_ids: list[int]
) -> None:
    """Whole characters, parts of some, silent and unknown ids in any order: with each token comes
    the very text that the output has for it, and with the last one all that was held back."""
    sampling = SamplingParams(max_tokens=len(ids), seed=1, ignore_eos=True)
    choice = choice_of(vocabulary, prompt_ids, sampling)
    output = OutputProcessor(vocabulary, prompt_ids)
    expected = [output.push(token_id)[0] for token_id in ids]
    expected[-1] += output.finish()
    assert [choice.accept(token_id) for token_id in ids] == expected
    assert choice.finish_reason == "length"
    assert choice.sequence.token_ids == prompt_ids + ids


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(st.integers(250, 262), min_size=1, max_size=30),
    stop_token_ids=st.sets(st.integers(250, 262), max_size=2),
    min_tokens=st.integers(0, 3),
)
def test_an_end_is_seen_whether_or_not_it_shows(
    ids: list[int], stop_token_ids: set[int], min_tokens: int
) -> None:
    """A stop id may be a silent one or have a text of its own: behind ``min_tokens`` it ends the
    answer, and the text before it is the text of the tokens before it."""
    sampling = SamplingParams(
        max_tokens=100,
        seed=1,
        ignore_eos=True,
        stop_token_ids=tuple(stop_token_ids),
        min_tokens=min_tokens,
    )
    choice = choice_of(BYTE_LEVEL, [97], sampling)
    texts: list[str] = []
    for token_id in ids:
        if choice.finish_reason is None:
            texts.append(choice.accept(token_id))
    ends = [at for at, token_id in enumerate(ids) if token_id in stop_token_ids]
    end = next((at for at in ends if at >= min_tokens), None)
    assert choice.finish_reason == (None if end is None else "stop")
    if end is not None:
        assert "".join(texts) == BYTE_LEVEL.decode(ids[:end])
