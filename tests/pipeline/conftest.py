"""What the tests of stages share: a context for stages, ears on the bus."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from infra.bus import Bus
from pipeline.stage import StageContext
from schemas.subjects import ROOT
from tests.pipeline.rig import Ear, LogLines, stage_context


@pytest.fixture
def lines() -> LogLines:
    """The log of this test's stages."""
    return LogLines()


@pytest.fixture
def ctx(bus: Bus, lines: LogLines) -> StageContext:
    """What a stage needs of its process."""
    return stage_context(bus, lines)


@pytest_asyncio.fixture
async def ear(bus: Bus) -> AsyncIterator[Ear]:
    """Hears everything from now on."""
    listening = Ear()
    subscription = await bus.subscribe(f"{ROOT}.>", listening.hear)
    yield listening
    await subscription.unsubscribe()
