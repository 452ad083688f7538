"""Sees every message of the journey on the bus, in the order in which the broker passed it on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from infra.bus import Bus, Msg
from schemas.subjects import ROOT

_ASIDE = (f"{ROOT}.live.", f"{ROOT}.beat.", f"{ROOT}.trace.")


@dataclass(frozen=True, slots=True)
class Seen:
    """One message: where, what, about which request, its fields, its headers."""

    subject: str
    tag: str
    request_id: str
    fields: dict[str, object]
    headers: dict[str, str]


@dataclass(slots=True)
class Observer:
    """Everything seen so far."""

    messages: list[Seen] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    @asynccontextmanager
    async def on(cls, bus: Bus) -> AsyncIterator[Observer]:
        observer = cls()
        subscription = await bus.subscribe(f"{ROOT}.>", observer._hear)
        try:
            yield observer
        finally:
            await subscription.unsubscribe()

    def of(self, tag: str) -> list[Seen]:
        return [message for message in self.messages if message.tag == tag]

    async def until(self, tag: str, timeout_s: float = 60.0) -> Seen:
        async with asyncio.timeout(timeout_s):
            while not (found := self.of(tag)):
                self._changed.clear()
                await self._changed.wait()
        return found[0]

    def _hear(self, message: Msg) -> None:
        if message.subject.startswith(_ASIDE):
            return
        fields = msgspec.msgpack.decode(message.data)
        request_id = fields.get("request_id", "")
        if "deltas" in fields:
            request_id = fields["deltas"][0]["request_id"]
        self.messages.append(
            Seen(message.subject, fields["schema"], request_id, fields, dict(message.headers or {}))
        )
        self._changed.set()
