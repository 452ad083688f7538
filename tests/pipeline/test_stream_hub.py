"""When a reader that follows its stream is given what came, without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from pipeline.stream_hub import StreamHub
from pipeline.token_stream import TokenStream
from schemas.codec import Message, encode
from schemas.tokens import Claim, StreamEnd, TokenBatch, TokenDelta, Usage


class Followed:
    """A claimed request whose tokens are taken as they come."""

    def __init__(self) -> None:
        self.hub = StreamHub(cast(Any, None), lambda: 0, None, lambda: None)
        self.stream: TokenStream = self.hub.open("r", "client.reader", 2**50)
        self.stream.follow(self.take)
        self.taken: list[int] = []
        self.has_more = asyncio.Event()
        self.seq = 0
        self.comes(Claim(request_id="r", epoch=1, worker="w", role="decode", served="m@1",
                         deadline_unix_ms=2**50))  # fmt: skip

    def take(self, deltas: Sequence[TokenDelta]) -> bool:
        self.taken += [token_id for delta in deltas for token_id in delta.ids]
        self.has_more.set()
        return True

    def comes(self, message: Message) -> None:
        self.seq += 1
        self.hub.on_message(self.seq, "", encode(message))

    def token(self, number: int, reason: str | None = None) -> None:
        delta = TokenDelta(
            request_id="r", epoch=1, number=number, ids=(number,), finish_reason=reason
        )
        self.comes(TokenBatch(worker="w", deltas=(delta,)))


async def test_an_answers_last_tokens_leave_with_its_end() -> None:
    """They are put off: the end, when it comes meanwhile, is known to who writes them."""
    followed = Followed()
    followed.token(0)
    assert followed.taken == [0], "the first one does not wait"
    followed.token(1)
    await asyncio.sleep(0)
    assert followed.taken == [0, 1]
    followed.hub.wakes._next_s = 0.0  # the rest is over
    followed.token(2)
    followed.token(3, "length")
    await asyncio.sleep(0)
    assert followed.taken == [0, 1], "the last ones do"
    usage = Usage(prompt_tokens=1, completion_tokens=4)
    followed.comes(
        StreamEnd(request_id="r", epoch=1, num_tokens=(4,), finish_reasons=("length",), usage=usage)
    )
    last = await followed.stream.next_deltas()
    assert [delta.number for delta in last] == [2, 3]
    assert followed.stream.is_ending


async def test_last_tokens_are_put_off_once_only() -> None:
    """An end that is late, for its worker may die before it, holds no token back."""
    followed = Followed()
    followed.token(0)
    followed.has_more.clear()
    followed.token(1, "length")
    async with asyncio.timeout(30):
        await followed.has_more.wait()
    assert followed.taken == [0, 1]
