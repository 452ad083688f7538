"""Several bridges behind one port, and what a stranger may say to them: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from infra.drain import Drainer
from tests.e2e.conftest import start_simulated
from tests.e2e.harness import MODEL, Mesh, mesh_of
from tests.freezing import freeze

NUM_CLIENTS = 30
NUM_TOKENS = 60
GROUP = "edge"
EXAMPLES = 8  # per operation and mode

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Edge:
    """A mesh whose two bridges share a port."""

    mesh: Mesh
    url: str

    def bridges(self) -> dict[str, int]:
        """Name and pid of those that say that they are ready."""
        beats = self.mesh.workers.values()
        ready = [b for b in beats if b.kind == "bridge" and b.state == "ready"]
        return {b.process.rpartition("-")[0]: b.pid for b in ready}

    async def until(self, look: Any) -> None:
        async with asyncio.timeout(60):
            while not look(self.bridges()):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> AsyncIterator[Edge]:
    async with mesh_of(tmp_path_factory.mktemp("mesh")) as mesh:
        await start_simulated(mesh, tiny_folder, speed=10)
        await mesh.start("bridge", GROUP, "--processes", "2", "--port", "0")
        edge = Edge(mesh, f"http://127.0.0.1:{await mesh.bridge_port(GROUP, 60)}")
        await edge.until(lambda bridges: len(bridges) == 2)
        yield edge


@dataclass
class Reader:
    """A client that resumes, and asks again what was lost before it had an id."""

    url: str
    number: int
    text: str = ""
    last_event_id: str = "0"
    request_id: str = ""
    is_done: bool = False
    broken: Counter[str] = field(default_factory=Counter)

    async def read(self) -> None:
        while not self.is_done:
            try:
                async with httpx.AsyncClient(timeout=60) as http:
                    await self._attempt(http)
            except httpx.TransportError as error:
                self.broken[type(error).__name__] += 1

    async def _attempt(self, http: httpx.AsyncClient) -> None:
        body = {
            "model": MODEL, "prompt": f"{self.number} says", "max_tokens": NUM_TOKENS,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        first = http.stream(
            "POST", f"{self.url}/v1/completions", json=body, headers={"x-mesh-event-ids": "1"}
        )
        further = http.stream(
            "GET",
            f"{self.url}/v1/requests/{self.request_id}/events",
            headers={"last-event-id": self.last_event_id},
        )
        async with further if self.request_id else first as answer:
            assert answer.status_code == 200, await answer.aread()
            self.request_id = answer.headers["x-mesh-request-id"]
            async for line in answer.aiter_lines():
                self._take(line)

    def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self.last_event_id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]


async def test_a_killed_bridge_fails_no_request_and_the_port_never_refuses(edge: Edge) -> None:
    """SIGKILL of one of two under load: streams that it carried break and are read on through the
    same port, all others go on; every client has its whole text. The dead one is started again,
    under its name, and the sibling is left alone."""
    before = edge.bridges()
    readers = [Reader(edge.url, number) for number in range(NUM_CLIENTS)]
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        for reader in readers:
            tasks.create_task(reader.read())
            while not reader.request_id and not reader.broken:
                await asyncio.sleep(0.001)
            if reader.number == NUM_CLIENTS // 2:
                os.kill(before["bridge-edge-1"], signal.SIGKILL)
    broken = sum((reader.broken for reader in readers), Counter[str]())
    assert set(broken) <= {"ReadError", "RemoteProtocolError", "WriteError"}, "the port refused"
    again = [Reader(edge.url, reader.number) for reader in readers]
    async with asyncio.TaskGroup() as tasks:
        for reader in again:
            tasks.create_task(reader.read())
    assert [reader.text for reader in readers] == [reader.text for reader in again]
    await edge.until(lambda now: now.get("bridge-edge-1") not in (None, before["bridge-edge-1"]))
    assert edge.bridges()["bridge-edge-2"] == before["bridge-edge-2"]


async def test_a_frozen_bridge_takes_no_connection_with_it(edge: Edge) -> None:
    """What it does not take, its sibling takes."""
    frozen = edge.bridges()["bridge-edge-2"]
    freeze(frozen)
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(timeout=60) as http:
            for _ in range(10):
                answer = await http.get(f"{edge.url}/health", headers={"connection": "close"})
                assert answer.json()["process"].startswith("bridge-edge-1-")
    finally:
        os.kill(frozen, signal.SIGCONT)
    await edge.until(lambda now: len(now) == 2)


async def test_metrics_are_each_process_s_own(edge: Edge) -> None:
    """At its health port; the shared port would answer for one or the other."""
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{edge.url}/metrics")).status_code == 404
        ports = {b.health_port for b in edge.mesh.workers.values() if b.kind == "bridge"
                 and b.pid in edge.bridges().values()}  # fmt: skip
        assert len(ports) == 2
        for port in ports:
            text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
            assert "mesh_requests_ended_total" in text


async def test_what_the_openapi_page_allows_and_forbids(edge: Edge) -> None:
    """Cases made from the page, those that it allows and those that it does not: never a 5xx, every
    refusal an error in OpenAI's shape, every answer one that the page tells of."""
    async with httpx.AsyncClient() as http:
        page = (await http.get(f"{edge.url}/openapi.json")).json()
    statuses = await asyncio.to_thread(fuzz, page, edge.url)
    assert statuses[200] > 0
    assert statuses[400] > 0
    async with httpx.AsyncClient(timeout=60) as http:
        body = {"model": MODEL, "prompt": "after that", "max_tokens": 2}
        assert (await http.post(f"{edge.url}/v1/completions", json=body)).status_code == 200


def fuzz(page: dict[str, Any], url: str) -> Counter[int]:
    load_all_checks()
    statuses: Counter[int] = Counter()
    for found in schemathesis.openapi.from_dict(page).get_all_operations():
        operation = found.ok()
        declared = page["paths"][operation.path][operation.method]
        fuzz_one(operation, GenerationMode.POSITIVE, url, statuses)
        can_be_wrong = any(one["in"] != "path" for one in declared["parameters"])
        if can_be_wrong or "requestBody" in declared:
            fuzz_one(operation, GenerationMode.NEGATIVE, url, statuses)
    return statuses


def fuzz_one(operation: Any, mode: GenerationMode, url: str, statuses: Counter[int]) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        bound(case)
        answer = case.call(base_url=url, timeout=60)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.content
        assert answer.headers["x-request-id"]
        if answer.status_code >= 400:
            error = json.loads(answer.content)["error"]
            assert error.keys() == {"message", "type", "param", "code"}
        case.validate_response(
            answer,
            checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
        )

    run()


def bound(case: Any) -> None:
    """A model that is there, few tokens, and no deadline that a caller would have himself to blame
    for."""
    (case.headers or {}).pop("x-mesh-deadline-ms", None)
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        if isinstance(case.body.get("max_tokens", 9), int):
            case.body["max_tokens"] = 2


async def test_bridges_that_are_drained_to_stay_down_stay_down(edge: Edge) -> None:
    """One: the other serves on. Both: their supervisor ends well, and the port refuses at last."""
    drainer = Drainer(edge.mesh.bus, print)
    await drainer.drain("edge-1", stay_down=True, timeout_s=60)
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.get(f"{edge.url}/health")
        assert answer.json()["process"].startswith("bridge-edge-2-")
    await drainer.drain("edge-2", stay_down=True, timeout_s=60)
    assert await asyncio.to_thread(edge.mesh.roles[GROUP].process.wait, 60) == 0
    async with httpx.AsyncClient(timeout=60) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{edge.url}/health")
