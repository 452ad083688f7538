"""Many simulated workers in few processes, on a real broker."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from infra.drain import Drainer
from infra.model_folder import open_model_folder
from loadgen.simulate_bus.model import write_model
from pipeline.cost_model import FREE
from schemas.control import Beat
from schemas.profiles import StepCosts
from schemas.requests import InferenceRequest
from tests.e2e.harness import MESH, Answer, Mesh, ask, mesh_of
from tests.workers.engine.simulated_engines import run, tokens_of
from workers.crew.figures import CrewFigures, read_figures
from workers.crew.plan import CrewWorker, write_crew
from workers.engine.api import EngineRequest
from workers.engine.simulated import build_simulated

NUM_PER_PROCESS = 6
PATIENCE_S = 120.0
SLOW = StepCosts(
    prefill_base_ms=0.0,
    prefill_token_ms=0.0,
    prefill_square_ms=0.0,
    decode_base_ms=100.0,
    decode_context_ms=0.0,
    decode_sequence_ms=0.0,
)


def crew_of(prefix: str, costs: StepCosts) -> tuple[CrewWorker, ...]:
    """Half of them prefill, half decode."""
    return tuple(
        CrewWorker(
            name=f"{prefix}-{number}",
            role="prefill" if number % 2 else "decode",
            costs=costs,
            num_blocks=512,
            kv_token_bytes=1000,
            profile="a-profile",
            rack=f"rack-{number % 3}",
        )
        for number in range(NUM_PER_PROCESS)
    )


async def start_crew(mesh: Mesh, folder: Path, name: str, costs: StepCosts) -> None:
    crew, figures = mesh.folder / f"{name}.json", mesh.folder / f"{name}-figures.json"
    write_crew(crew_of(name, costs), crew)
    files = ("--crew", str(crew), "--crew-figures", str(figures))
    await mesh.start_worker(name, "both", folder, "--engine", "simulated", *files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights."""
    made = tmp_path_factory.mktemp("model")
    write_model(made, 4096)
    return made


@pytest_asyncio.fixture
async def mesh(tmp_path: Path, folder: Path) -> AsyncIterator[Mesh]:
    """A broker and a control process. Silence is no death for three seconds: the machine may be
    busy, and each process is six workers."""
    async with mesh_of(tmp_path, time_scale=2.0) as made:
        await made.start("control", "control", "--model", f"{made.model}={folder}")
        yield made


def members(mesh: Mesh, name: str) -> list[Beat]:
    """What the workers of a crew said last."""
    return [beat for beat in mesh.workers.values() if beat.process.startswith(f"worker-{name}-")
            and beat.worker]  # fmt: skip


async def until_all_ready(mesh: Mesh, *names: str) -> None:
    await mesh.until_ready("control")
    async with asyncio.timeout(PATIENCE_S):
        while mesh.num_ready_workers < len(names) * NUM_PER_PROCESS:
            mesh.check_alive()
            await asyncio.sleep(0.02)


async def figures(mesh: Mesh, name: str, num_requests: int) -> CrewFigures:
    """Once the crews' file tells of so many requests."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            mesh.roles[name].send(signal.SIGUSR1)
            found = read_figures(mesh.folder / f"{name}-figures.json")
            if found and sum(one.num_requests for one in found.workers) >= num_requests:
                return found
            await asyncio.sleep(0.02)


async def test_two_processes_are_twelve_workers_and_leave_when_asked(
    mesh: Mesh, folder: Path
) -> None:
    """Answers are those of one engine alone, to the token; each worker has an identity, costs and a
    drain of its own; SIGTERM drains all of a process, whose requests end well."""
    for name in ("a", "b"):
        await start_crew(mesh, folder, name, FREE)
    await until_all_ready(mesh, "a", "b")
    told = members(mesh, "a") + members(mesh, "b")
    assert len({beat.worker for beat in told}) == 2 * NUM_PER_PROCESS
    assert len({beat.pid for beat in told}) == 2
    assert {beat.costs for beat in told} == {FREE}
    assert {beat.kv_token_bytes for beat in told} == {1000}
    assert {(beat.profile, beat.rack) for beat in told} == {
        ("a-profile", f"rack-{number}") for number in range(3)
    }

    requests = [
        mesh.request(tuple(10 + (start + place) % 40 for place in range(30)), max_tokens=20, seed=1)
        for start in range(24)
    ]
    async with mesh.client() as client:
        answers = await asyncio.gather(*(ask(client, request, 240.0) for request in requests))
    check(folder, requests, answers)

    done = await figures(mesh, "a", 1)
    assert [one.name for one in done.workers] == [f"a-{n}" for n in range(NUM_PER_PROCESS)]
    assert sum(one.num_steps for one in done.workers) > 0

    one = members(mesh, "a")[0]
    gone = await Drainer(mesh.bus, lambda line: None).drain(
        one.worker, stay_down=False, timeout_s=PATIENCE_S
    )
    assert gone.worker == one.worker
    assert mesh.roles["a"].process.poll() is None, "the other five stay"

    for name in ("a", "b"):
        mesh.roles[name].send(signal.SIGTERM)
    for name in ("a", "b"):
        assert await asyncio.to_thread(mesh.roles[name].process.wait, PATIENCE_S) == 0
    async with asyncio.timeout(PATIENCE_S):
        while {beat.state for beat in members(mesh, "a") + members(mesh, "b")} != {"gone"}:
            await asyncio.sleep(0.02)


def check(folder: Path, requests: list[InferenceRequest], answers: list[Answer]) -> None:
    """Each is what one engine of the same model gives, alone."""
    facts = open_model_folder(folder)
    engine = build_simulated(
        folder,
        context_length=facts.context_length,
        eos_token_ids=facts.eos_token_ids,
        costs=FREE,
    )
    for request, answer in zip(requests, answers, strict=True):
        assert isinstance(request.prompt, tuple)
        engine.add(EngineRequest(key="one", prompt_ids=request.prompt, sampling=request.sampling))
        assert list(answer.ids[0]) == tokens_of(run(engine), "one")
    engine.pool.close()


async def test_a_killed_process_takes_all_its_workers_and_no_stream(
    mesh: Mesh, folder: Path
) -> None:
    """Half of the fleet goes at once, in the middle of its streams: others go on with each."""
    for name in ("a", "b"):
        await start_crew(mesh, folder, name, SLOW)
    await until_all_ready(mesh, "a", "b")
    requests = [
        mesh.request(
            tuple(10 + (start + place) % 40 for place in range(30)),
            max_tokens=30, min_tokens=30, ignore_eos=True, seed=1,
        )
        for start in range(12)
    ]  # fmt: skip
    async with mesh.client() as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(client, request, 240.0)) for request in requests]
        async with asyncio.timeout(PATIENCE_S):
            while not (busy := [name for name in ("a", "b") if is_decoding(mesh, name)]):
                await asyncio.sleep(0.02)
        mesh.roles[busy[0]].kill()
    answers = [task.result() for task in asked]
    check(folder, requests, answers)
    assert {len(answer.ids[0]) for answer in answers} == {30}


def is_decoding(mesh: Mesh, name: str) -> bool:
    """Whether some worker of the crew runs a sequence."""
    return any(beat.load.num_running and "decode" in beat.roles for beat in members(mesh, name))


async def test_a_crew_that_can_not_be_is_refused_in_words(
    mesh: Mesh, folder: Path, tmp_path: Path
) -> None:
    """One line that names file, worker and field; exit code 2."""
    crew = tmp_path / "crew.json"
    crew.write_text('{"workers": [{"name": "x"}]}')
    role = await mesh.start_worker(
        "x", "both", folder, "--engine", "simulated", "--crew", str(crew)
    )
    assert await asyncio.to_thread(role.process.wait, PATIENCE_S) == 2
    line = role.log.read_text().splitlines()[-1]
    assert line.startswith("mesh worker:")
    assert f"{crew}: Object missing required field `role` - at `$.workers[0]`" in line


def test_only_simulated_workers_share_a_process(tmp_path: Path) -> None:
    """Engines that compute would share its one interpreter."""
    done = subprocess.run(
        [str(MESH), "worker", "--crew", str(tmp_path / "crew.json")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "worker.crew" in done.stderr
