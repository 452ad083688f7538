"""A request's tokens, as the engine brings them and as its readers are told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import pack_ids
from schemas.requests import RequestRecord, SamplingParams
from schemas.tokens import TokenDelta, TokenLogprob
from tests.workers.workplace import READER, SERVED
from workers.claims import Claimed
from workers.engine.api import TokenOutput
from workers.running import Running

NUM_CHOICES = 3
LOGPROB = TokenLogprob(token_id=1, token="x", logprob=-0.5)


def running(*, logprobs: int | None) -> Running:
    """One that comes with tokens of another worker: so many as its choices' numbers."""
    record = RequestRecord(
        request_id="r" * 32,
        model="tiny",
        revision="1",
        reader=READER,
        served=SERVED,
        prompt_ids=pack_ids([1, 2, 3]),
        sampling=SamplingParams(n=NUM_CHOICES, logprobs=logprobs, max_tokens=99),
        admitted_unix_ms=0,
        deadline_unix_ms=0,
    )
    tokens = tuple((7,) * index for index in range(NUM_CHOICES))
    return Running(Claimed(record=record, epoch=1, seq=1, role="decode", tokens=tokens))


def outputs_of(steps: Sequence[Sequence[int]], *, is_scored: bool) -> list[list[TokenOutput]]:
    """What steps bring in which these choices get a token each; the last of each ends it."""
    left = [sum(step.count(index) for step in steps) for index in range(NUM_CHOICES)]
    numbers = list(range(NUM_CHOICES))
    made: list[list[TokenOutput]] = []
    for step in steps:
        made.append([])
        for index in step:
            left[index] -= 1
            made[-1].append(
                TokenOutput(
                    key="k",
                    index=index,
                    number=numbers[index],
                    token_id=100 * index + numbers[index],
                    text="ab"[: numbers[index] % 3],
                    finish_reason=None if left[index] else "length",
                    logprob=LOGPROB if is_scored else None,
                )
            )
            numbers[index] += 1
    return made


def singles(deltas: Sequence[TokenDelta]) -> list[TokenDelta]:
    """A delta per token, by choice."""
    split = [one for delta in deltas for one in delta.split()]
    return sorted(split, key=lambda one: (one.index, one.number))


@given(
    st.lists(st.permutations(range(NUM_CHOICES)), max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.booleans(),
)
def test_tokens_are_the_same_however_many_steps_are_told_at_once(
    steps: list[list[int]], cuts: list[bool], is_scored: bool
) -> None:
    """One by one or a run of steps together: the same tokens, told apart, with the same ends; and
    what is noted is what was told."""
    made = outputs_of(steps, is_scored=is_scored)
    one_by_one = running(logprobs=1 if is_scored else None)
    expected = [one_by_one.take(output) for step in made for output in step]
    together = running(logprobs=1 if is_scored else None)
    told: list[TokenDelta] = []
    for _, run in groupby(zip(cuts, made, strict=False), key=lambda pair: pair[0]):
        told += together.take_all([output for _, step in run for output in step])
    assert singles(told) == singles(expected)
    assert together.tokens == one_by_one.tokens
    assert together.finished == one_by_one.finished
    assert together.num_new_tokens == NUM_CHOICES * len(steps)
