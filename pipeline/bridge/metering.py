"""Where the caller's permit meets a request: which models it sees, what it pays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pipeline.access.charge import Charge
from pipeline.access.errors import RateLimited
from pipeline.bridge.call import Call
from pipeline.bridge.errors import ClientLeft
from pipeline.bridge.generate import Generation
from pipeline.bridge.ports import Models
from schemas.errors import MeshError, ModelNotFound
from schemas.models import ModelCard

Handler = Callable[[Call], Awaitable[None]]

_NO_TOKENS = Charge(0, 0)


def find_model(call: Call, models: Models, name: str) -> ModelCard:
    """The model ``name``.

    Raises:
        ModelNotFound: there is none, or the caller may not use it: it can't tell which.
    """
    card = models.get(name) if call.permit.may_use(name) else None
    if card is None:
        doubt = ", or this API key may not use it" if call.permit.key_name else ""
        raise ModelNotFound(f"no model is called {name[:200]!r}{doubt}", param="model")
    return card


def visible_models(call: Call, models: Models) -> Sequence[ModelCard]:
    """The models that the caller may use."""
    return [card for card in models.cards() if call.permit.may_use(card.name)]


def counted(handler: Handler) -> Handler:
    """``handler`` as a request that uses no tokens; raises RateLimited before it begins."""

    async def handle(call: Call) -> None:
        call.permit.enter(_NO_TOKENS)
        try:
            await handler(call)
        finally:
            call.permit.end(0)

    return handle


def settle(call: Call, generation: Generation, ending: MeshError | None) -> None:
    """Charge what a generation has used by its end.

    The usage where there is one. An answer that broke off: its prompt, and what was heard of it. A
    failure of ours before the first token, or a refusal: nothing. One that runs on without its
    client: all that was reserved.
    """
    call.permit.end(_used(call, generation, ending))


def _used(call: Call, generation: Generation, ending: MeshError | None) -> int | None:
    if ending is None:  # or a bug, and nobody knows
        return generation.tokens_so_far if generation.is_complete else None
    if call.runs_on:
        return None
    if isinstance(ending, RateLimited):
        return 0
    if isinstance(ending, ClientLeft) or generation.has_begun:
        return generation.tokens_so_far
    return 0
