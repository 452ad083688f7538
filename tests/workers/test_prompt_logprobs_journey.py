"""A prompt's logprobs on their way: through two workers, a take-over, a message that is full."""

from __future__ import annotations

import pytest

from schemas.tokens import StreamError, TokenDelta, TokenLogprob
from tests.workers.engine.simulated_engines import expected_scores
from tests.workers.test_prefill_decode import alone, pair, same
from tests.workers.workplace import PROMPT, Answer, Workplace


def scores(answer: Answer, index: int = 0) -> list[tuple[TokenLogprob, ...] | None]:
    """Per delta of a choice."""
    return [delta.prompt_logprobs for delta in answer.deltas if delta.index == index]


@pytest.mark.parametrize("sampling", [{}, {"n": 3, "temperature": 0.9}, {"max_tokens": 1}])
async def test_they_come_once_with_the_first_token(
    place: Workplace, sampling: dict[str, object]
) -> None:
    """Prefilled here, decoded there, the prompt known to the cache from before: each choice's token
    0 brings them, and answer and end are those without."""
    await pair(place)
    await place.answer(await place.ask())
    record = await place.ask(prompt_logprobs=2, logprobs=1, **sampling)
    answer = await place.answer(record)
    same(record, answer)
    for index in range(record.sampling.n):
        first, *others = scores(answer, index)
        assert first == expected_scores(PROMPT, 2)
        assert others == [None] * len(others)
    assert answer.end.usage.cached_tokens == 0


async def test_no_answer_is_asked_for(place: Workplace) -> None:
    """``max_tokens`` 0: it ends where it was prefilled; the hidden token carries the scores and is
    not counted."""
    prefill, _ = await pair(place)
    answer = await place.answer(await place.ask(prompt_logprobs=0, logprobs=0, max_tokens=0, n=2))
    assert answer.end.num_tokens == (1, 1)
    assert answer.end.finish_reasons == ("length", "length")
    assert answer.end.usage.completion_tokens == 0
    assert [(delta.text, delta.logprobs) for delta in answer.deltas] == [("", None)] * 2
    assert scores(answer, 0) == scores(answer, 1) == [expected_scores(PROMPT, 0)]
    assert not len(prefill.host.leases)


@pytest.mark.parametrize("count", [0, 1, 4])
async def test_a_take_over_brings_them_if_nobody_did(place: Workplace, count: int) -> None:
    """Its owner died with so many tokens stored: a reader has the scores once, from whoever
    published token 0."""
    await pair(place)
    record = await place.record(prompt_logprobs=2)
    seq = await place.dead_claim(record, epoch=1, after_seq=0)
    await place.dead_tokens(
        record,
        [
            TokenDelta(
                request_id=record.request_id,
                epoch=1,
                number=output.number,
                ids=(output.token_id,),
                text=output.text,
                prompt_logprobs=output.prompt_logprobs,
            )
            for output in alone(record)[:count]
        ],
    )
    await place.place(record, epoch=2, after_seq=seq)
    answer = await place.answer(record)
    same(record, answer)
    assert [found is not None for found in scores(answer)] == [True] + [False] * 11
    assert scores(answer)[0] == expected_scores(PROMPT, 2)


async def test_more_than_a_message_holds_is_refused(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens may be called anything: what admission's bound lets through and no message takes ends
    with an error that names the field; others go on."""
    prefill, _ = await pair(place)
    vocabulary = prefill.engine._vocabulary
    monkeypatch.setattr(vocabulary, "token_text", lambda token_id: "x" * 500_000)
    record = await place.ask(prompt_logprobs=0)
    terminal = (await place.answer(record)).view.terminal
    assert isinstance(terminal, StreamError)
    assert (terminal.error.code, terminal.error.param) == ("payload_too_large", "logprobs")
    monkeypatch.undo()
    another = await place.ask(prompt_logprobs=0)
    same(another, await place.answer(another))
