"""Deltas of several tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.tokens import TokenDelta

WORDS = st.lists(st.text(max_size=3), min_size=1, max_size=6)


@given(words=WORDS, number=st.integers(0, 9), reason=st.sampled_from([None, "length"]))
def test_a_delta_is_split_into_its_tokens(
    words: list[str], number: int, reason: str | None
) -> None:
    """One delta per token, each with its number, id and text; the reason stands at the last."""
    whole = TokenDelta(
        request_id="r",
        epoch=2,
        number=number,
        ids=tuple(range(40, 40 + len(words))),
        text="".join(words),
        index=1,
        finish_reason=reason,
        sizes=tuple([len(word) for word in words[:-1]]),
    )
    parts = whole.split()
    assert [part.text for part in parts] == whole.texts() == words
    assert [part.number for part in parts] == list(range(number, number + len(words)))
    assert [part.ids for part in parts] == [(token_id,) for token_id in whole.ids]
    assert [part.finish_reason for part in parts] == [None] * (len(words) - 1) + [reason]
    assert {(part.request_id, part.epoch, part.index, part.sizes) for part in parts} == {
        ("r", 2, 1, ())
    }


def test_what_is_not_told_apart_stays_one() -> None:
    """A writer may leave out whose text is whose."""
    whole = TokenDelta(request_id="r", epoch=1, number=0, ids=(1, 2), text="ab")
    assert whole.split() == [whole]
    assert whole.texts() == ["ab"]
