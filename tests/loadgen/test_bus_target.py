import asyncio
from types import SimpleNamespace

import pytest

from loadgen.driver import closed_loop
from loadgen.measure import RequestResult
from loadgen.recorder import Recorder
from loadgen.targets import BusTarget
from schemas.errors import BusUnavailable, MeshError, QueueFull
from schemas.requests import InferenceRequest
from schemas.tokens import StreamEnd, TokenDelta, Usage
from tests.loadgen.fakes import WORKLOAD, limits


class Stream:
    """A token stream with scripted deltas; ``error`` in place of its end."""

    def __init__(self, request: InferenceRequest, mesh: "Mesh") -> None:
        self._mesh = mesh
        self._pending = [
            [self._delta(request, 0, 1)],
            [self._delta(request, 1, 1), self._delta(request, 2, mesh.last_tokens, "length")],
        ]
        self.end: StreamEnd | None = None
        self.is_closed = False
        self._id = request.request_id

    def _delta(
        self, request: InferenceRequest, number: int, count: int, reason: str | None = None
    ) -> TokenDelta:
        return TokenDelta(
            request_id=request.request_id,
            epoch=1,
            number=number,
            ids=(7,) * count,
            finish_reason=reason,
        )

    async def next_deltas(self) -> list[TokenDelta]:
        if self._pending:
            return self._pending.pop(0)
        if self._mesh.error is not None:
            raise self._mesh.error
        if self._mesh.is_stuck:
            await asyncio.Event().wait()
        self.end = StreamEnd(
            request_id=self._id,
            epoch=1,
            num_tokens=(3,),
            finish_reasons=("length",),
            usage=Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=1),
        )
        return []

    async def aclose(self) -> None:
        self.is_closed = True
        if self._mesh.is_cancel_stuck:
            await asyncio.Event().wait()


class Mesh:
    """Stands for ``MeshClient``."""

    def __init__(self, error: MeshError | None = None, last_tokens: int = 1) -> None:
        self.bus = SimpleNamespace(now_unix_ms=lambda: 50_000)
        self.error = error
        self.last_tokens = last_tokens
        self.is_stuck = self.is_cancel_stuck = False
        self.requests: list[InferenceRequest] = []
        self.streams: list[Stream] = []

    async def submit(self, request: InferenceRequest) -> Stream:
        self.requests.append(request)
        self.streams.append(Stream(request, self))
        return self.streams[-1]


async def load(mesh: Mesh, timeout_s: float = 60.0) -> RequestResult:
    recorder = Recorder()
    target = BusTarget(mesh, timeout_s=timeout_s)  # type: ignore[arg-type]
    one = limits(num_requests=1, timeout_s=timeout_s)
    async with asyncio.timeout(60):
        await closed_loop(target, WORKLOAD.requests(), 1, one, recorder)
    return recorder.results[0]


async def test_each_delta_is_an_event_and_counts_are_exact() -> None:
    """Deltas that come together are events of one moment; usage must match to the token."""
    mesh = Mesh()
    result = await load(mesh)
    assert (result.state, result.num_tokens, len(result.event_s)) == ("completed", 3, 3)
    assert result.event_s[1] == result.event_s[2] == result.end_s
    assert result.usage is not None
    assert result.usage.cached_tokens == 1
    assert not mesh.streams[0].is_closed


async def test_one_token_more_than_usage_says_is_a_mismatch() -> None:
    """The bus tells how many tokens a delta holds, so a difference of one is an error."""
    result = await load(Mesh(last_tokens=2))
    assert (result.error_kind, result.error_message) == (
        "usage_mismatch",
        "4 tokens came, usage says 3",
    )


@pytest.mark.parametrize("error", [QueueFull("full"), BusUnavailable("away")])
async def test_an_error_of_the_mesh_is_counted_by_its_code(error: MeshError) -> None:
    """What a reader would see is what the report counts."""
    result = await load(Mesh(error))
    assert (result.error_kind, result.error_message) == (error.code, error.message)


@pytest.mark.parametrize("is_cancel_stuck", [False, True])
async def test_a_request_given_up_is_cancelled_on_the_bus(
    monkeypatch: pytest.MonkeyPatch, is_cancel_stuck: bool
) -> None:
    """The mesh is told to stop, and a bus that does not answer can't hold the generator."""
    monkeypatch.setattr("loadgen.targets.CANCEL_TIMEOUT_S", 0.05)
    mesh = Mesh()
    mesh.is_stuck, mesh.is_cancel_stuck = True, is_cancel_stuck
    result = await load(mesh, timeout_s=0.05)
    assert (result.state, result.error_kind, len(result.event_s)) == ("failed", "timeout", 3)
    assert mesh.streams[0].is_closed


async def test_the_deadline_lies_in_broker_time_after_the_drivers_own() -> None:
    """The driver gives up first; the deadline on the bus is for a generator that died."""
    mesh = Mesh()
    await load(mesh, timeout_s=5.0)
    assert mesh.requests[0].deadline_unix_ms == 50_000 + 6_000
