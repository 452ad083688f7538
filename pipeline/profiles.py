"""Worker profiles in the bucket ``mesh_models``: one per kind of worker, beside the model cards.

    $KV.mesh_models.<model>            ModelCard
    $KV.mesh_models.profile.<name>     WorkerProfile

``mesh profile`` writes them with the rights of control; workers read theirs when they start. Nobody
follows changes: a worker that runs knows better by then what its steps cost.
"""

from __future__ import annotations

import contextlib
from typing import Final

from infra.bus import Bus
from infra.bus.names import MODELS, MODELS_BUCKET
from infra.bus.replay import replay
from schemas import subjects
from schemas.codec import decode, encode
from schemas.errors import SchemaError
from schemas.profiles import WorkerProfile

_KEYS: Final = f"$KV.{MODELS_BUCKET}.profile"
_DELETED: Final = b""  # the value of a key that was deleted


class ProfileBook:
    """The registered profiles."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def put(self, profile: WorkerProfile) -> None:
        """Write it, over another of its name.

        Raises:
            SchemaError: its name can't be a key.
            BusUnavailable, BusForbidden: it may not be stored; only control may write.
        """
        await self._bus.publish_stored(_key(profile.name), encode(profile))

    async def get(self, name: str) -> WorkerProfile | None:
        """The profile of that name, if there is one that we can read.

        Raises:
            SchemaError: the name can't be a key.
            BusUnavailable: the bus is away.
        """
        message = await self._bus.last_message(MODELS, _key(name))
        if message is None or message.data == _DELETED:
            return None
        with contextlib.suppress(SchemaError):  # of a newer version
            return decode(message.data, WorkerProfile)
        return None

    async def all(self) -> dict[str, WorkerProfile]:
        """All of them, by name, in order.

        Raises:
            BusUnavailable: the bus is away.
        """
        found = []
        async for message in replay(self._bus, MODELS, f"{_KEYS}.*", last_per_subject=True):
            with contextlib.suppress(SchemaError):  # deleted, or of a newer version
                found.append(decode(message.data, WorkerProfile))
        return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def _key(name: str) -> str:
    return f"{_KEYS}.{subjects.encode_name(name)}"
