"""More requests than the workers have room for: who goes next, and that none is lost meanwhile.

The order of claims tells, not the time. The one worker runs two sequences and may have a few tasks
more ahead of it; everything else waits in control, un-acked.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from infra.bus import EmbeddedBroker, Msg, waiting_work
from infra.task_scope import task_scope
from pipeline.client import MeshClient
from pipeline.token_stream import TokenStream
from schemas import subjects
from schemas.errors import RequestCancelled, SchemaError
from schemas.requests import InferenceRequest
from schemas.tokens import Claim, StreamEnd, decode_chain_entry
from tests.e2e.harness import Mesh, Role, mesh_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOTS = 2
AHEAD = SLOTS + 4  # claimed or on their way, whoever comes later
WORKER = (
    "--engine", "simulated", "--speed", "5", "--max-num-sequences", str(SLOTS),
)  # fmt: skip


@dataclass(slots=True)
class Crowd:
    """A mesh whose workers are few, and what is heard of it."""

    mesh: Mesh
    client: MeshClient
    models: tuple[str, ...]
    control: str = "control-0"  # one that runs
    num_controls: int = 1  # so far
    claims: list[str] = field(default_factory=list)  # request ids, in the order of first claims
    ends: Counter[str] = field(default_factory=Counter)

    def hear(self, message: Msg) -> None:
        try:
            entry = decode_chain_entry(message.data)
        except SchemaError:
            return
        if isinstance(entry, Claim) and entry.request_id not in self.claims:
            self.claims.append(entry.request_id)
        elif isinstance(entry, StreamEnd):
            self.ends[entry.request_id] += 1

    async def relieve(self) -> Role:
        """Start another control process, which then knows the worker; the one that it is to take
        over from."""
        relieved = self.mesh.roles[self.control]
        self.control = f"control-{self.num_controls}"
        self.num_controls += 1
        await self.mesh.start("control", self.control, *self.models)
        await self.mesh.until_ready(self.control)
        await self.worker_has_beaten()
        return relieved

    async def worker_has_beaten(self) -> None:
        """A control process waits for a beat of everybody, but not for one that a busy machine
        delays: as long as it knows no worker, nobody waits in it but all in the queue."""
        before = self.mesh.beat_of("both-0")
        async with asyncio.timeout(60):
            while self.mesh.beat_of("both-0") is before:
                await asyncio.sleep(0.01)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The worker does not go on meanwhile: however slow this machine is, some must wait."""
        worker = self.mesh.roles["both-0"]
        worker.send(signal.SIGSTOP)
        try:
            yield
        finally:
            worker.send(signal.SIGCONT)

    async def submit(self, count: int, *, tenant: str = "", priority: int = 0) -> list[TokenStream]:
        """So many requests, all of them accepted."""
        streams = []
        for _ in range(count):
            request: InferenceRequest = msgspec.structs.replace(
                self.mesh.request("The sea is", max_tokens=24, ignore_eos=True),
                tenant=tenant,
                priority=priority,
            )
            streams.append(await self.client.submit(request))
        for stream in streams:
            await stream.accepted()
        return streams

    async def read(self, streams: list[TokenStream]) -> None:
        """All of them, to their ends, at once."""
        async with asyncio.timeout(120), task_scope() as tasks:
            for stream in streams:
                tasks.create_task(self.read_one(stream))
            while any(stream.end is None for stream in streams):
                await asyncio.sleep(0.01)

    async def read_one(self, stream: TokenStream) -> None:
        numbers = [delta.number async for delta in stream]
        assert numbers == sorted(set(numbers)), "a token is missing or comes twice"

    def places(self, streams: list[TokenStream], among: list[TokenStream]) -> list[int]:
        """Where in the order of claims among all of ``among`` each of ``streams`` stands."""
        ids = {stream.request_id for stream in among}
        order = [one for one in self.claims if one in ids]
        return [order.index(stream.request_id) for stream in streams]

    def num_begun(self, among: list[TokenStream]) -> int:
        """How many of them were claimed so far: what comes later can't be before these."""
        return len({stream.request_id for stream in among}.intersection(self.claims))

    async def num_held(self, control: str) -> int:
        """Requests that wait in this control process."""
        url = f"http://127.0.0.1:{self.mesh.beat_of(control).health_port}/metrics"
        async with httpx.AsyncClient() as http:
            page = (await http.get(url)).text
        families = {family.name: family for family in text_string_to_metric_families(page)}
        return int(sum(one.value for one in families["mesh_waiting_requests"].samples))

    async def num_waiting(self) -> int:
        """Messages that admission has not acked."""
        waiting = await waiting_work(self.mesh.bus)
        return waiting.get(subjects.admission(self.mesh.model), 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> AsyncIterator[Crowd]:
    # Slow times: a worker that a busy machine starves must not count as dead, for without a worker
    # there is no order but that of the queue.
    async with mesh_of(tmp_path_factory.mktemp("crowd"), time_scale=4.0) as mesh:
        models = (f"--model={mesh.model}={tiny_folder}", "--aging-s", "2")
        await mesh.start("control", "control-0", *models)
        await mesh.start_worker("both-0", "both", tiny_folder, *WORKER)
        await mesh.until_ready()
        async with mesh.client() as client:
            crowd = Crowd(mesh, client, models)
            await crowd.worker_has_beaten()
            await mesh.bus.subscribe(subjects.live(subjects.ALL_CHAINS), crowd.hear)
            yield crowd


async def test_a_small_tenant_is_served_by_turns_with_a_big_one(crowd: Crowd) -> None:
    """One sends ten times as much, and first: the other's wait for what is under way, and then for
    one each."""
    big = await crowd.submit(30, tenant="big")
    small = await crowd.submit(3, tenant="small")
    ahead = crowd.num_begun(big + small) + AHEAD
    await crowd.read(big + small)
    places = crowd.places(small, big + small)
    assert places == sorted(places)
    assert all(place <= ahead + 2 * (i + 1) for i, place in enumerate(places)), places
    assert await crowd.num_waiting() == 0


async def test_priorities_go_first_and_nothing_starves(crowd: Crowd) -> None:
    """What is important overtakes what waits; what has waited for its time shares with it."""
    low = await crowd.submit(12, tenant="low")
    high = await crowd.submit(1, tenant="high", priority=1)
    ahead = crowd.num_begun(low + high) + AHEAD
    high += await crowd.submit(39, tenant="high", priority=1)
    await crowd.read(low + high)
    assert max(crowd.places(high[:1], low + high)) <= ahead + 1
    waited = crowd.places(low, low + high)[AHEAD:]
    assert max(waited) < len(low + high) - 1, "the last one went before the last important one"


async def test_who_is_cancelled_while_it_waits_is_never_begun(crowd: Crowd) -> None:
    """Its admission is acked, and nobody claims it; the others go on."""
    others = await crowd.submit(AHEAD + 4)
    with crowd.standing_still():  # its turn does not come
        (gone,) = await crowd.submit(1)
        await gone.cancel()
        with pytest.raises(RequestCancelled):
            await crowd.read_one(gone)
    await crowd.read(others)
    assert gone.request_id not in crowd.claims
    assert await crowd.num_waiting() == 0


async def test_control_is_killed_while_many_wait(crowd: Crowd) -> None:
    """Another goes on with those that wait: each is answered once, with one claim and one end."""
    with crowd.standing_still():
        streams = await crowd.submit(30)
        assert await crowd.num_waiting() > 0
    relieved = await crowd.relieve()
    relieved.kill()
    await crowd.read(streams)
    assert [crowd.ends[stream.request_id] for stream in streams] == [1] * len(streams)
    assert await crowd.num_waiting() == 0
    await crowd.mesh.until_idle()


async def test_a_control_that_drains_hands_over_who_waits(crowd: Crowd) -> None:
    """It leaves while they wait, for a worker that stands still, and the other one has them. Who of
    the two holds them is the broker's choice."""
    names = {crowd.control}
    await crowd.relieve()
    names.add(crowd.control)
    with crowd.standing_still():
        streams = await crowd.submit(30)
        held = {name: await crowd.num_held(name) for name in names}
        name = max(held, key=held.__getitem__)
        assert held[name] > 0
        (crowd.control,) = names - {name}
        leaving = crowd.mesh.roles[name]
        leaving.send(signal.SIGTERM)
        await asyncio.to_thread(leaving.process.wait, 60)
    assert leaving.process.returncode == 0
    assert '"outcome":"cut_off"' in leaving.log.read_text(), "it gave some back"
    await crowd.read(streams)
    assert [crowd.ends[stream.request_id] for stream in streams] == [1] * len(streams)
    assert await crowd.num_waiting() == 0


async def test_control_freezes_while_many_wait(crowd: Crowd) -> None:
    """Whoever else there is has them in the end; what the frozen one does when it wakes is void."""
    frozen = await crowd.relieve()
    streams = await crowd.submit(30)
    frozen.send(signal.SIGSTOP)
    try:
        await crowd.read(streams)
    finally:
        frozen.send(signal.SIGCONT)
    assert [crowd.ends[stream.request_id] for stream in streams] == [1] * len(streams)
    async with asyncio.timeout(60):
        while await crowd.num_waiting():  # the one that was frozen looks at what it holds
            await asyncio.sleep(0.05)
    await crowd.mesh.until_idle()


async def test_the_broker_is_killed_while_many_wait(crowd: Crowd) -> None:
    """They wait on in its store: each is answered once when it is back."""
    broker = crowd.mesh.broker
    assert isinstance(broker, EmbeddedBroker)
    with crowd.standing_still():
        streams = await crowd.submit(30)
        assert await crowd.num_waiting() > 0
    await broker.kill()
    await broker.restart()
    await crowd.read(streams)
    assert all(isinstance(stream.end, StreamEnd) for stream in streams)
    async with asyncio.timeout(60):
        while await crowd.num_waiting():
            await asyncio.sleep(0.05)
    await crowd.mesh.until_idle()
