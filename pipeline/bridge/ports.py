"""What the bridge needs from the rest of the mesh, as interfaces.

``pipeline.client.MeshClient`` and ``pipeline.registry.Registry`` have these shapes; tests bring
their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from schemas.models import ModelCard
from schemas.requests import InferenceRequest, RequestRecord
from schemas.tokenize import Detokenized, Question, Tokenized
from schemas.tokens import Accepted, StreamEnd, TokenDelta


class Stream(Protocol):
    """The tokens of one request."""

    @property
    def request_id(self) -> str:
        """Of its request."""

    @property
    def end(self) -> StreamEnd | None:
        """Usage and finish reasons, once ``next_deltas`` has said that it is complete."""

    @property
    def num_tokens(self) -> int:
        """Tokens heard of so far, of all choices."""

    @property
    def is_ending(self) -> bool:
        """Whether nothing follows what is ready but the end."""

    @property
    def is_durable(self) -> bool:
        """Whether the request is stored: it goes on, and can be resumed, without this bridge."""

    async def accepted(self) -> Accepted:
        """Wait for admission; raises the MeshError with which the request was refused."""

    async def next_deltas(self) -> list[TokenDelta]:
        """All that is ready, at least one; empty when complete. Raises MeshError on failure."""

    def follow(self, take: Callable[[Sequence[TokenDelta]], bool] | None) -> None:
        """Give what comes to ``take`` at once, in place of waking who waits in ``next_deltas``;
        what it refuses, by False, is ready there. None ends that."""

    async def cancel(self, reason: str = "") -> None:
        """End the request wherever it is."""

    def leave(self) -> None:
        """Stop reading; the request runs on."""

    async def aclose(self) -> None:
        """Stop reading; cancels a request that has not ended."""


class Client(Protocol):
    """The way to the bus."""

    async def submit(self, request: InferenceRequest) -> Stream:
        """Publish ``request``. Raises BusUnavailable or PayloadTooLarge."""

    async def record(self, request_id: str) -> tuple[int, RequestRecord] | None:
        """What admission wrote of a request, and where in the stream. Raises SchemaError for what
        can be no id, and BusUnavailable."""

    def resume(
        self, request_id: str, *, reader: str, start_seq: int, record: RequestRecord
    ) -> AbstractAsyncContextManager[Stream]:
        """Read what ``reader`` submitted, from its first token on, beside others."""


AskTokenizer = Callable[[Question], Awaitable[Tokenized | Detokenized]]
"""Ask a model's tokenizer. Raises MeshError: refused, or nobody answered in time."""


class Models(Protocol):
    """The models that can be asked for."""

    def get(self, name: str) -> ModelCard | None:
        """The model of this name."""

    def cards(self) -> Sequence[ModelCard]:
        """All of them."""
