from __future__ import annotations

import pytest

from infra.bus import Bus
from infra.bus.names import MODELS_BUCKET
from pipeline.cost_model import FREE
from pipeline.profiles import ProfileBook
from pipeline.registry import Registry
from schemas.errors import SchemaError
from schemas.profiles import WorkerProfile
from tests.conftest import Connect


def profile(name: str, hardware: str = "") -> WorkerProfile:
    return WorkerProfile(name=name, costs=FREE, hardware=hardware)


async def test_what_is_put_all_can_read(bus: Bus, connect: Connect) -> None:
    """Names of any kind; a worker's rights are enough for reading."""
    book, reader = ProfileBook(bus), ProfileBook(await connect("worker"))
    names = ["h100", "tiny@r1.native bf16.cpu-2", "mödel 漢"]
    for name in names:
        await book.put(profile(name))
    assert list(await reader.all()) == sorted(names)
    for name in names:
        assert await reader.get(name) == profile(name)
    assert await reader.get("other") is None


async def test_the_last_one_of_a_name_counts(bus: Bus) -> None:
    """A worker that is measured again has its new costs."""
    book = ProfileBook(bus)
    await book.put(profile("one", "old"))
    await book.put(profile("one", "new"))
    assert await book.get("one") == profile("one", "new")
    assert [one.hardware for one in (await book.all()).values()] == ["new"]


async def test_profiles_and_models_do_not_meet(bus: Bus) -> None:
    """They share a bucket: a model may be called as a profile, and neither list has the other's."""
    book, registry = ProfileBook(bus), Registry(bus)
    await registry.start()
    await book.put(profile("profile"))
    await registry.refresh()
    assert registry.cards() == []
    assert await book.get("profile") == profile("profile")


async def test_what_can_not_be_read_is_none(bus: Bus) -> None:
    """A deleted profile, and one of a newer version, count as not there."""
    book = ProfileBook(bus)
    for name, data in (("gone", b""), ("newer", b"\x81\xa6schema\xa7other/9")):
        await bus.publish_stored(f"$KV.{MODELS_BUCKET}.profile.{name}", data)
        assert await book.get(name) is None
    assert await book.all() == {}
    with pytest.raises(SchemaError):
        await book.get("")
