"""The tokens that a request's stream holds: a worker that takes it over goes on from them."""

from __future__ import annotations

import contextlib

from msgspec.structs import replace

from infra.bus import TOKENS, Bus, replay
from pipeline.claim_chain import ClaimChain
from pipeline.ownership import RequestView
from schemas import subjects
from schemas.errors import BusUnavailable, Poisoned, SchemaError
from schemas.tokens import TokenBatch, decode_chain_entry, decode_stream_message
from workers.claims import Claimed

POISON_EPOCHS = 3  # so many epochs in a row without a token, and nobody tries again


async def with_stored_tokens(bus: Bus, chain: ClaimChain, claimed: Claimed) -> Claimed:
    """``claimed`` with its tokens as every reader has them; they are never sampled again.

    Raises:
        Poisoned: it has cost several workers their epoch for nothing.
        BusUnavailable: the stream can't be read now.
    """
    view = await _view(bus, chain, claimed)
    if view.epochs_without_token >= POISON_EPOCHS:
        raise Poisoned(f"{view.epochs_without_token} epochs in a row brought no token")
    n = claimed.num_choices
    return replace(claimed, tokens=view.tokens(n), finished=view.finish_reasons(n))


async def _view(bus: Bus, chain: ClaimChain, claimed: Claimed) -> RequestView:
    """The request as its stream tells it from its record up to, and with, our claim."""
    record = claimed.record
    view = RequestView(record.request_id)
    found = await chain.record(record.request_id)
    claims = subjects.chain(record.reader, record.request_id)
    stored = replay(
        bus,
        TOKENS,
        [subjects.token_stream(record.reader), claims],
        start_seq=found[0] if found else 1,
        until_seq=claimed.seq + 1,
    )
    async with contextlib.aclosing(stored) as messages:
        async for message in messages:
            with contextlib.suppress(SchemaError):  # a newer peer's: readers pass over it too
                if message.subject == claims:
                    view.apply_entry(message.seq, decode_chain_entry(message.data))
                else:
                    _apply_tokens(view, message.data)
    if view.chain_seq != claimed.seq:  # the server that we read from is not up to date
        raise BusUnavailable(f"claim {claimed.key} can't be read yet")
    return view


def _apply_tokens(view: RequestView, data: bytes) -> None:
    batch = decode_stream_message(data)
    for delta in batch.deltas if isinstance(batch, TokenBatch) else ():
        if delta.request_id == view.request_id:
            view.apply_delta(delta)
