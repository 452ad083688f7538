"""Requests without a client of their own: announced, waited for, ended. A clock set by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from infra.log import make_logger
from infra.times import Times
from pipeline.bridge.windows import Windows
from schemas.errors import BusUnavailable, EngineFailed

TIMES = Times()


@dataclass
class Desk:
    """Windows, with the bus and the clock in our hands."""

    now_s: float = 1000.0
    announced: list[list[str]] = field(default_factory=list)
    cancelled: list[tuple[str, str]] = field(default_factory=list)
    bus_error: Exception | None = None
    log: io.StringIO = field(default_factory=io.StringIO)
    windows: Windows = field(init=False)

    def __post_init__(self) -> None:
        self.windows = Windows(
            self._announce,
            self._cancel,
            TIMES,
            make_logger("test", stream=self.log),
            max_waiting=3,
            now_s=lambda: self.now_s,
        )

    async def _announce(self, request_ids: Sequence[str]) -> None:
        if self.bus_error:
            raise self.bus_error
        self.announced.append(list(request_ids))

    async def _cancel(self, request_id: str, reason: str) -> None:
        if self.bus_error:
            raise self.bus_error
        self.cancelled.append((request_id, reason))

    async def after(self, seconds: float) -> list[str]:
        """What was given up by the beat that comes then."""
        self.now_s += seconds
        before = len(self.cancelled)
        await self.windows.beat()
        return [request_id for request_id, _ in self.cancelled[before:]]


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_what_is_read_is_announced_at_once_and_with_every_beat(desk: Desk) -> None:
    """Until the last of its readers here has left."""
    async with desk.windows.adopted("r-1"):
        assert desk.announced == [["r-1"]]
        async with desk.windows.adopted("r-1"):
            pass
        desk.announced.clear()
        await desk.after(0.5)
        assert desk.announced == [["r-1"]]
    await desk.after(0.5)
    assert len(desk.announced) == 1


async def test_many_are_announced_in_messages_of_bounded_size(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are read here, no message is over the broker's limit, and none is left out."""
    monkeypatch.setattr("pipeline.bridge.windows._IDS_PER_MESSAGE", 2)
    async with (
        desk.windows.adopted("r-1"), desk.windows.adopted("r-2"), desk.windows.adopted("r-3")
    ):  # fmt: skip
        desk.announced.clear()
        await desk.after(0.5)
    assert desk.announced == [["r-1", "r-2"], ["r-3"]]


async def test_a_request_waits_for_its_window_and_is_cancelled(desk: Desk) -> None:
    """Each for its own, not longer, and once."""
    assert desk.windows.wait_for_client("r-1", 5.0)
    assert desk.windows.wait_for_client("r-2", 20.0)
    assert await desk.after(5.0) == []
    assert await desk.after(0.1) == ["r-1"]
    assert await desk.after(14.0) == []
    assert await desk.after(1.0) == ["r-2"]
    assert await desk.after(60.0) == []
    assert desk.cancelled[0] == ("r-1", "no client came back within the resume window")
    assert desk.windows.num_waiting == 0


async def test_a_request_that_somebody_reads_waits_on(desk: Desk) -> None:
    """Here or through another bridge; its window begins anew when they leave."""
    desk.windows.wait_for_client("here", 5.0)
    desk.windows.wait_for_client("there", 5.0)
    async with desk.windows.adopted("here"):
        for _ in range(20):
            desk.windows.hear(["there"])
            assert await desk.after(1.0) == []
    assert await desk.after(3.9) == []
    assert await desk.after(0.2) == ["there"]
    assert await desk.after(1.0) == ["here"]


async def test_adoption_is_believed_for_three_beats(desk: Desk) -> None:
    """A bridge that adopted and died keeps nobody from cancelling."""
    assert not desk.windows.is_adopted("r-1")
    desk.windows.hear(["r-1"])
    desk.now_s += TIMES.dead_s
    assert desk.windows.is_adopted("r-1")
    desk.now_s += 0.1
    assert not desk.windows.is_adopted("r-1")


async def test_what_waits_is_bounded(desk: Desk) -> None:
    """Beyond the limit a request is not kept."""
    assert all(desk.windows.wait_for_client(f"r-{i}", 5.0) for i in range(3))
    assert not desk.windows.wait_for_client("r-3", 5.0)
    assert desk.windows.num_waiting == 3


async def test_an_outage_keeps_nothing_for_ever(desk: Desk) -> None:
    """Nothing is announced or ended while the bus is away; both are done when it is back."""
    desk.windows.wait_for_client("r-1", 5.0)
    desk.bus_error = BusUnavailable("away")
    async with desk.windows.adopted("r-2"):
        assert await desk.after(6.0) == []
        desk.bus_error = None
        assert await desk.after(0.5) == ["r-1"]
        assert desk.announced == [["r-2"]]


async def test_one_that_can_not_be_ended_does_not_hold_up_the_others(desk: Desk) -> None:
    """It is logged and left to its deadline."""
    desk.windows.wait_for_client("r-1", 5.0)
    desk.bus_error = EngineFailed("no")
    assert await desk.after(6.0) == []
    assert "cancel_failed" in desk.log.getvalue()
    assert desk.windows.num_waiting == 0
