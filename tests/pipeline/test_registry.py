from __future__ import annotations

import asyncio

import pytest

from infra.bus import Bus, EmbeddedBroker
from infra.task_scope import task_scope
from pipeline.registry import Registry
from schemas import subjects
from schemas.errors import BusUnavailable, ModelNotFound
from schemas.models import ModelCard
from tests.conftest import Connect, Until


def card(name: str, revision: str = "r1") -> ModelCard:
    return ModelCard(
        name=name,
        revision=revision,
        served=subjects.served(name, revision),
        folder="models",
        architecture="llama",
        context_length=128,
        vocab_size=512,
        has_chat_template=True,
        created_unix_s=1,
    )


async def started(bus: Bus) -> Registry:
    registry = Registry(bus)
    await registry.start()
    return registry


async def test_what_one_registers_all_see(bus: Bus, connect: Connect, until: Until) -> None:
    """Those that were there before, and those that start later; names of any kind."""
    early = await started(await connect("bridge"))
    control = await started(bus)
    names = ["tiny", "org/Tiny-2.5", "mödel 漢"]
    for name in names:
        await control.register(card(name))
    await until(lambda: len(early.cards()) == 3)
    late = await started(await connect("bridge"))
    for registry in (early, control, late):
        assert [one.name for one in registry.cards()] == sorted(names)
        assert registry.get("org/Tiny-2.5") == card("org/Tiny-2.5")


async def test_the_newest_revision_is_served(bus: Bus, connect: Connect, until: Until) -> None:
    """Registering a name again changes what it means, everywhere."""
    control, reader = await started(bus), await started(await connect("bridge"))
    await control.register(card("tiny", "r1"))
    await control.register(card("tiny", "r2"))
    await until(lambda: reader.get("tiny") == card("tiny", "r2"))
    assert (await started(bus)).require("tiny").revision == "r2"


async def test_an_unknown_model_is_not_found(bus: Bus) -> None:
    """The error says what is there."""
    registry = await started(bus)
    with pytest.raises(ModelNotFound, match="none"):
        registry.require("tiny")
    await registry.register(card("tiny"))
    with pytest.raises(ModelNotFound, match="known: tiny") as caught:
        registry.require("Tiny")
    assert (caught.value.param, registry.get("Tiny")) == ("model", None)


async def test_after_an_outage_the_copy_is_true_again(
    bus: Bus, connect: Connect, until: Until
) -> None:
    """What was registered while a reader was cut off is read when it is back."""
    away = await connect("bridge")
    control, reader = await started(bus), await started(away)
    await control.register(card("tiny", "r1"))
    await until(lambda: reader.get("tiny"))
    async with task_scope() as tasks:
        tasks.create_task(reader.run())
        away._client.drop_connection()
        await control.register(card("tiny", "r2"))
        await until(lambda: reader.get("tiny") == card("tiny", "r2"), 10)
    assert away.is_connected


async def test_a_card_that_can_not_be_read_changes_nothing(bus: Bus, until: Until) -> None:
    """A delete marker, or a card of a newer version, leaves what is known."""
    registry = await started(bus)
    await registry.register(card("tiny"))
    heard = asyncio.Event()
    await bus.subscribe("$KV.mesh_models.>", lambda message: heard.set())
    await bus.publish_stored("$KV.mesh_models.tiny", b"")
    await heard.wait()
    await registry.refresh()
    assert registry.get("tiny") == card("tiny")


async def test_without_a_broker_nothing_starts(broker: EmbeddedBroker, bus: Bus) -> None:
    """An error of ours, at once."""
    registry = await started(bus)
    await broker.kill()
    with pytest.raises(BusUnavailable):
        await registry.refresh()
    with pytest.raises(BusUnavailable):
        await registry.register(card("tiny"))
