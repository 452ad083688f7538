"""The models that the mesh serves: a live copy of the KV bucket ``mesh_models``.

The control process registers the models it admits requests for; everybody else reads. The copy
follows by core subscription to the bucket's subjects and is read again after a reconnect, since a
watcher of the client library stays blind for many seconds after a broker restart.
"""

from __future__ import annotations

import asyncio
from typing import Final

from infra.bus import Bus, Msg
from infra.bus.names import MODELS, MODELS_BUCKET
from infra.bus.replay import replay
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import BusUnavailable, ModelNotFound, SchemaError
from schemas.models import ModelCard

_KEYS: Final = f"$KV.{MODELS_BUCKET}"
_RETRY_S = 0.2


class Registry:
    """What ``mesh_models`` holds."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cards: dict[str, ModelCard] = {}
        self._num_changes = 0
        self._stale = asyncio.Event()
        self._has_any = asyncio.Event()

    async def start(self) -> None:
        """Subscribe, then read what is there.

        Raises:
            BusUnavailable: the bus is away.
        """
        await self._bus.subscribe(f"{_KEYS}.>", self._on_change)
        self._bus.on_reconnected.append(self._stale.set)
        await self.refresh()

    async def run(self) -> None:
        """Read again after each reconnect, until cancelled."""
        while True:
            await self._stale.wait()
            try:
                await self.refresh()
            except BusUnavailable:
                await asyncio.sleep(_RETRY_S)  # the next reconnect sets the event as well
                continue
            self._stale.clear()

    async def until_any(self) -> None:
        """Wait until some model is known."""
        await self._has_any.wait()

    async def register(self, card: ModelCard) -> None:
        """Write ``card``; the newest revision of a name is the one that is served."""
        data = encode(card)
        await self._bus.publish_stored(f"{_KEYS}.{subjects.encode_name(card.name)}", data)
        self._apply(data)

    def get(self, name: str) -> ModelCard | None:
        """The card of ``name``, if it is registered."""
        return self._cards.get(name)

    def require(self, name: str) -> ModelCard:
        """The card of ``name``.

        Raises:
            ModelNotFound: it is not registered.
        """
        card = self.get(name)
        if card is None:
            known = ", ".join(sorted(self._cards)) or "none"
            raise ModelNotFound(
                f"model {name!r} is not served here (known: {known})", param="model"
            )
        return card

    def cards(self) -> list[ModelCard]:
        """All models, by name."""
        return [self._cards[name] for name in sorted(self._cards)]

    async def refresh(self) -> None:
        """Read the whole bucket.

        Raises:
            BusUnavailable: the bus is away.
        """
        num_changes = -1
        while num_changes != self._num_changes:  # one heard meanwhile is newer than what is read
            num_changes = self._num_changes
            async for message in replay(self._bus, MODELS, f"{_KEYS}.>", last_per_subject=True):
                self._apply(message.data)

    def _on_change(self, message: Msg) -> None:
        self._num_changes += 1
        self._apply(message.data)

    def _apply(self, data: bytes) -> None:
        try:
            card = decode(data, ModelCard)
        except SchemaError:
            return  # a delete marker, or a card of a newer version
        self._cards[card.name] = card
        self._has_any.set()
