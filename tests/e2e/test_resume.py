"""Streams that outlive their connection and their bridge: real processes, two bridges."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from pipeline.claim_chain import ChainTip, ClaimChain
from schemas import subjects
from schemas.tokens import Cancelled, ChainEntry
from tests.e2e.conftest import start_simulated
from tests.e2e.harness import Mesh, mesh_of

TIME_SCALE = 0.25
SPEED = 1.0  # 50 tokens per second
GOES, STAYS = "bridge-a", "bridge-b"
LONG = 480  # tokens; the tiny model's context is 512

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Reading:
    """What a client has of one stream, event by event; it may break off and go on."""

    request_id: str = ""
    events: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.events)

    @property
    def last_event_id(self) -> str:
        ids = [event.split(b"\n")[0] for event in self.events if event.startswith(b"id: ")]
        return ids[-1].removeprefix(b"id: ").decode() if ids else "0"

    @property
    def is_done(self) -> bool:
        return self.events[-1:] == [b"data: [DONE]\n\n"]


class Body:
    """The answer that is being read into ``reading``."""

    def __init__(self, answer: httpx.Response, reading: Reading) -> None:
        assert answer.status_code == 200
        self.window = answer.headers.get("x-mesh-resume-window")
        reading.request_id = answer.headers["x-mesh-request-id"]
        self._reading = reading
        self._raw = answer.aiter_raw()
        self._rest = b""

    async def read(self, count: int | None = None) -> None:
        """``count`` events more at least; None: to the end."""
        goal = math.inf if count is None else len(self._reading.events) + count
        while len(self._reading.events) < goal:
            data = await anext(self._raw, b"")
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n\n")
            self._reading.events += [e + b"\n\n" for e in whole if not e.startswith(b":")]

    async def broken(self) -> None:
        """Read until the connection breaks."""
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await self.read()


@dataclass
class Bridges:
    """A mesh with two bridges, and HTTP clients of them."""

    mesh: Mesh
    urls: dict[str, str]
    http: httpx.AsyncClient

    async def find(self, bridge: str) -> None:
        self.urls[bridge] = f"http://127.0.0.1:{await self.mesh.bridge_port(bridge)}"

    def body(self, salt: str, num_tokens: int) -> dict[str, object]:
        """The same question each time; a salt of its own keeps the prompt's KV from being found,
        so that usage is the same as well."""
        return {
            "model": self.mesh.model, "prompt": "The sea is", "max_tokens": num_tokens, "n": 2,
            "temperature": 0.8, "seed": 5, "ignore_eos": True, "stream": True, "cache_salt": salt,
            "stream_options": {"include_usage": True},
        }  # fmt: skip

    @asynccontextmanager
    async def ask(
        self, bridge: str, reading: Reading, *, salt: str = "", num_tokens: int = LONG,
        window: str | None = None,
    ) -> AsyncIterator[Body]:  # fmt: skip
        headers = {"x-mesh-event-ids": "1"}
        if window is not None:
            headers["x-mesh-resume-window"] = window
        url, body = f"{self.urls[bridge]}/v1/completions", self.body(salt, num_tokens)
        async with self.http.stream("POST", url, json=body, headers=headers) as answer:
            yield Body(answer, reading)

    @asynccontextmanager
    async def resumed(self, bridge: str, reading: Reading) -> AsyncIterator[Body]:
        url = f"{self.urls[bridge]}/v1/requests/{reading.request_id}/events"
        headers = {"Last-Event-ID": reading.last_event_id}
        async with self.http.stream("GET", url, headers=headers) as answer:
            yield Body(answer, reading)

    async def read_on(self, bridge: str, reading: Reading) -> None:
        async with self.resumed(bridge, reading) as body:
            await body.read()

    async def status(self, bridge: str, request_id: str) -> int:
        """Of an attempt to resume."""
        url = f"{self.urls[bridge]}/v1/requests/{request_id}/events"
        return (await self.http.get(url)).status_code

    def reader(self, bridge: str) -> str:
        return subjects.bridge_reader(self.mesh.beat_of(bridge).process)

    async def tip(self, reader: str, request_id: str) -> ChainTip:
        return await ClaimChain(self.mesh.bus).tip(reader, request_id)

    async def end_of(self, reader: str, request_id: str) -> ChainEntry | None:
        """Wait until the request has ended; how."""
        async with asyncio.timeout(60):
            while not (tip := await self.tip(reader, request_id)).has_ended:
                await asyncio.sleep(0.02)
        return tip.entry


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> AsyncIterator[Bridges]:
    """The mesh of this module, with the bridge that stays."""
    async with mesh_of(tmp_path_factory.mktemp("mesh"), time_scale=TIME_SCALE) as mesh:
        async with httpx.AsyncClient(timeout=60) as http:
            bridges = Bridges(mesh, {}, http)
            await mesh.start("bridge", STAYS, "--port", "0")
            await start_simulated(mesh, tiny_folder, speed=SPEED)
            await bridges.find(STAYS)
            yield bridges


@pytest_asyncio.fixture(loop_scope="module")
async def bridges(shared: Bridges) -> AsyncIterator[Bridges]:
    """One more bridge, for this test alone."""
    await shared.mesh.start("bridge", GOES, "--port", "0", "--grace-s", "0.5")
    await shared.mesh.until_ready(GOES)
    await shared.find(GOES)
    yield shared
    shared.mesh.roles[GOES].kill()
    shared.mesh.roles[GOES].log.unlink()  # the next one's port is another
    await shared.mesh.until_idle()


def same_but_for_names(one: Reading, other: Reading) -> bool:
    """Whether two answers to one question have the same bytes; each has its own id and time. How
    the events of its choices take turns is each answer's own, too: a worker that was held up tells
    the tokens of several steps at once, choice after choice."""

    def plain(reading: Reading) -> dict[bytes, list[bytes]]:
        created = reading.body.partition(b'"created":')[2].partition(b",")[0]
        by_choice: dict[bytes, list[bytes]] = {}
        for event in reading.events:
            data = event[event.index(b"data: ") :].replace(reading.request_id.encode(), b"ID")
            data = data.replace(b'"created":' + created, b'"created":0')
            index = data.partition(b'"index":')[2].partition(b",")[0]  # of usage and end: none
            by_choice.setdefault(index, []).append(data)
        return by_choice

    return plain(one) == plain(other)


async def test_a_killed_bridge_costs_no_byte(bridges: Bridges) -> None:
    """SIGKILL in mid-stream: the client goes on through the other bridge from its last event and
    has the bytes of an undisturbed answer. Others that read the same request from the beginning,
    meanwhile and afterwards, have them as well."""
    undisturbed, reading, second, late = Reading(), Reading(), Reading(), Reading()
    async with bridges.ask(STAYS, undisturbed, salt="first", num_tokens=100) as body:
        await body.read()
    async with bridges.ask(GOES, reading, salt="second", num_tokens=100) as body:
        await body.read(30)
        bridges.mesh.roles[GOES].kill()
        await body.broken()
    assert not reading.is_done
    had, second.request_id, late.request_id = len(reading.events), *(reading.request_id,) * 2
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(bridges.read_on(STAYS, reading))
        tasks.create_task(bridges.read_on(STAYS, second))
    assert reading.is_done
    assert len(reading.events) > had + 50, "the bridge died too late for this test"
    await bridges.read_on(STAYS, late)
    assert reading.body == second.body == late.body
    assert same_but_for_names(reading, undisturbed)


async def test_only_what_is_adopted_outlives_a_dead_bridge(bridges: Bridges) -> None:
    """A request that another bridge reads runs to its end, beyond the window after which those
    that nobody reads are ended."""
    times = bridges.mesh.bus.times
    reading, left = Reading(), Reading()
    async with (
        bridges.ask(GOES, reading, salt="first") as body,
        bridges.ask(GOES, left, salt="second") as other,
    ):
        await body.read(5)
        await other.read(5)
        reader = bridges.reader(GOES)
        bridges.mesh.roles[GOES].kill()
        killed_s = time.monotonic()
        await body.broken()
    async with bridges.resumed(STAYS, reading) as body:
        await body.read(5)
        entry = await bridges.end_of(reader, left.request_id)
        assert isinstance(entry, Cancelled)
        assert time.monotonic() - killed_s > times.resume_window_s - 2 * times.beat_s
        assert not (await bridges.tip(reader, reading.request_id)).has_ended
        await body.read()
    assert reading.is_done


async def test_with_a_window_a_client_may_leave_and_come_back(bridges: Bridges) -> None:
    """The request runs on meanwhile, and is not ended while it is read, through whichever bridge,
    although its window is long over."""
    reading, window_s = Reading(), 1.0
    async with bridges.ask(GOES, reading, num_tokens=350, window=str(window_s)) as body:
        assert body.window == "1"
        await body.read(10)
    async with bridges.resumed(STAYS, reading) as body:
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < 3 * window_s:
            await body.read(1)
    async with bridges.resumed(GOES, reading) as body:
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < 2 * window_s:
            await body.read(1)
    await bridges.read_on(STAYS, reading)
    assert reading.is_done
    numbers = [int(event.split(b"\n")[0].removeprefix(b"id: ")) for event in reading.events[:-1]]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_client_that_does_not_come_back_ends_its_request(bridges: Bridges) -> None:
    """After its window, not before; without one at once. Their blocks are free then; who comes
    too late reads what there was, and that it was cancelled."""
    reading, at_once, reader = Reading(), Reading(), bridges.reader(GOES)
    async with (
        bridges.ask(GOES, reading, salt="first", window="2") as body,
        bridges.ask(GOES, at_once, salt="second") as other,
    ):
        await body.read(5)
        await other.read(5)
    left_s = time.monotonic()
    await bridges.end_of(reader, at_once.request_id)
    assert not (await bridges.tip(reader, reading.request_id)).has_ended
    entry = await bridges.end_of(reader, reading.request_id)
    assert time.monotonic() - left_s > 1.9
    assert entry == Cancelled(
        request_id=reading.request_id, reason="no client came back within the resume window"
    )
    await bridges.mesh.until_idle()
    await bridges.read_on(STAYS, reading)
    assert b'"code":"cancelled"' in reading.events[-1]
    assert len(reading.events) > 20


async def test_a_bridge_that_drains_leaves_what_may_be_resumed(bridges: Bridges) -> None:
    """It tells its clients and ends what nobody asked to be waited for; the rest goes on through
    another bridge without a gap."""
    waits, ends, reader = Reading(), Reading(), bridges.reader(GOES)
    async with (
        bridges.ask(GOES, waits, salt="first", num_tokens=200, window="5") as body,
        bridges.ask(GOES, ends, salt="second") as other,
    ):
        await body.read(5)
        await other.read(5)
        bridges.mesh.roles[GOES].send(signal.SIGTERM)
        await body.read()
        await other.read()
    for reading in (waits, ends):
        assert b'"code":"shutting_down"' in reading.events[-1]
    assert isinstance(await bridges.end_of(reader, ends.request_id), Cancelled)
    del waits.events[-1]
    await bridges.read_on(STAYS, waits)
    assert waits.is_done
    numbers = [int(event.split(b"\n")[0].removeprefix(b"id: ")) for event in waits.events[:-1]]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_what_is_not_there_can_not_be_resumed(bridges: Bridges) -> None:
    """404 for an unknown id; 400 for a batch, and for a request that came over the bus."""
    assert await bridges.status(STAYS, "0" * 32) == 404
    batch = bridges.body("", 2) | {"prompt": ["one", "two"], "n": 1}
    whole = await bridges.http.post(f"{bridges.urls[GOES]}/v1/completions", json=batch)
    assert await bridges.status(STAYS, whole.headers["x-mesh-request-id"]) == 400
    async with bridges.mesh.client() as client:
        request = bridges.mesh.request("The sea is", max_tokens=2, ignore_eos=True)
        async with await client.submit(request) as stream:
            assert [delta.number async for delta in stream] == [0, 1]
    assert await bridges.status(STAYS, request.request_id) == 400
