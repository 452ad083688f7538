"""Logprobs in chat's form: what a client gets of a token's bytes."""

from __future__ import annotations

from pipeline.bridge.logprobs import chat_logprobs
from schemas.tokens import TokenLogprob, TopLogprob


def test_bytes_are_those_of_the_token() -> None:
    """The text's, or those that came beside it where the text has U+FFFD for them; null when a
    worker of an older version sent none."""
    part = TopLogprob(token_id=1, token="\ufffd", logprob=-1.0, raw=b"\xf0\x9f")
    unknown = TopLogprob(token_id=2, token="\ufffd", logprob=-2.0)
    whole = TokenLogprob(token_id=3, token="é", logprob=-0.5, top=(part, unknown))
    (entry,) = chat_logprobs([whole]).content
    assert entry.bytes == [0xC3, 0xA9]
    assert [top.bytes for top in entry.top_logprobs] == [[0xF0, 0x9F], None]
