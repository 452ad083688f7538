"""A chaos run from settings to a report."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.bus import Bus
from infra.times import Times
from loadgen.chaos.answer import Answer, compare
from loadgen.chaos.cases import Case, lasting_case, make_cases, with_stop
from loadgen.chaos.clients import BusClient, SseClient
from loadgen.chaos.fault import Scene
from loadgen.chaos.faults import FAULTS
from loadgen.chaos.mesh import ChaosMesh, NotWhole, Target, until
from loadgen.chaos.own_mesh import OwnSettings, Starter, own_chaos_mesh
from loadgen.chaos.report import ChaosReport
from loadgen.chaos.resume import HttpResume
from loadgen.chaos.rounds import RoundResult, Rounds, plan
from loadgen.chaos.settings import ChaosSettings
from loadgen.chaos.witness import Witness
from loadgen.settings import user_of
from pipeline.client import MeshClient
from pipeline.registry import Registry
from schemas.errors import ConfigError, MeshError

Say = Callable[[str], None]
_START_S = 60.0
_GONE_S = 10.0


class ReferenceFailed(MeshError):
    """An undisturbed request failed: nothing can be compared with it."""

    code = "reference_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the mesh is."""

    client_nats_url: str
    control_nats_url: str
    bridges: tuple[str, ...]
    starter: Starter | None = None


async def run_chaos(settings: ChaosSettings, say: Say) -> ChaosReport:
    """Start or find the mesh, learn the undisturbed answers, play all rounds, look for leaks.

    Args:
        say: gets a line per round.

    Raises:
        MeshError: the mesh did not start, or did not come back from a fault.
    """
    report = ChaosReport(engine=settings.engine, settings=_public(settings))
    with _folder(settings, report) as folder:
        async with _place(settings, folder, say) as place:
            mesh = await _play_all(settings, place, report, say)
        left = mesh.silent() if settings.is_attached else await _left_over(mesh)
        for target in left:
            say(f"still there: pid {target.pid} ({target.name})")
        report.at_end.leaked_processes = len(left)
    return report


@contextmanager
def _folder(settings: ChaosSettings, report: ChaosReport) -> Generator[Path, None, None]:
    """The mesh's data directory; a temporary one stays when there is something to look up."""
    if settings.folder is not None:
        yield settings.folder
        return
    made = Path(tempfile.mkdtemp(prefix="mesh-chaos-"))
    is_clean = False
    try:
        yield made
        is_clean = report.total.is_clean
    finally:
        if is_clean:
            shutil.rmtree(made)


def _public(settings: ChaosSettings) -> dict[str, Any]:
    names = ("count", "point", "seed", "time_scale", "speed", "num_streams", "num_tokens",
             "num_controls", "overlap", "model_name", "is_attached")  # fmt: skip
    return {name: getattr(settings, name) for name in names}


@asynccontextmanager
async def _place(settings: ChaosSettings, folder: Path, say: Say) -> AsyncGenerator[Place, None]:
    if settings.is_attached:
        yield Place(
            client_nats_url=settings.nats_url,
            control_nats_url=settings.control_nats_url or settings.nats_url,
            bridges=settings.bridges,
        )
        return
    say(f"starting a mesh with the {settings.engine} engine; logs in {folder / 'logs'}")
    own = OwnSettings(
        engine=settings.engine,
        model=settings.model,
        time_scale=settings.time_scale,
        speed=settings.speed,
        num_controls=settings.num_controls,
        kv_transports=settings.kv_transports,
        folder=folder,
    )
    async with own_chaos_mesh(own) as started:
        yield Place(
            client_nats_url=started.client_nats_url,
            control_nats_url=started.control_nats_url,
            bridges=started.bridges,
            starter=started.starter,
        )


async def _play_all(
    settings: ChaosSettings, place: Place, report: ChaosReport, say: Say
) -> ChaosMesh:
    times = Times().scaled(settings.time_scale)
    async with AsyncExitStack() as stack:
        url = place.control_nats_url
        bus = await stack.enter_async_context(
            await Bus.connect(url, role=user_of(url), name="chaos", times=times)
        )
        client = await stack.enter_async_context(
            MeshClient.connect(place.client_nats_url, times=times)
        )
        mesh = ChaosMesh(bus, place.bridges, place.client_nats_url)
        await mesh.watch()
        await _until_there(mesh, settings)
        report.engine = ", ".join(sorted({beat.engine for beat in mesh.ready("worker")}))
        witness = Witness(bus)
        await witness.start()
        scene = _scene(settings, place, mesh)
        bus_client = BusClient(client, settings.model_name, settings.timeout_s)
        cases = await _undisturbed(settings, bus_client, bus)
        http = SseClient(
            place.bridges,
            settings.model_name,
            HttpResume(2 * times.dead_s),
            stall_s=settings.timeout_s,
            is_mesh=True,
        )
        rounds = Rounds(
            scene, witness, cases=cases, bus=bus_client, http=http,
            num_streams=settings.num_streams, timeout_s=settings.timeout_s,
        )  # fmt: skip
        await _play(settings, scene, rounds, report, say)
        return mesh


def _scene(settings: ChaosSettings, place: Place, mesh: ChaosMesh) -> Scene:
    return Scene(
        mesh=mesh,
        client_nats_url=place.client_nats_url,
        control_nats_url=place.control_nats_url,
        model=settings.model_name,
        rng=random.Random(settings.seed),
        time_scale=settings.time_scale,
        starter=place.starter,
    )


async def _until_there(mesh: ChaosMesh, settings: ChaosSettings) -> None:
    """Everybody that we know of is ready: all bridges, all control processes, the workers."""
    num_controls = 1 if settings.is_attached else settings.num_controls
    controls: set[str] = set()  # seen, not all at one time: beats of a busy mesh come late
    bridges: set[str] = set()

    def is_there() -> bool:
        controls.update(beat.process for beat in mesh.ready("control"))
        bridges.update(url for url in mesh.bridges if url not in bridges and mesh.bridge(url))
        is_whole = len(controls) >= num_controls and len(bridges) == len(mesh.bridges)
        return is_whole and all(mesh.ready(kind) for kind in ("control", "bridge", "worker"))

    if not await until(is_there, _START_S):
        raise NotWhole(f"not every bridge and control process was ready within {_START_S:.0f} s")
    await asyncio.sleep(2 * mesh.bus.times.beat_s)  # two beats of everybody else
    mesh.note_whole()


async def _undisturbed(
    settings: ChaosSettings, client: BusClient, bus: Bus
) -> dict[str, tuple[Case, Answer]]:
    """Every case with its answer; each is asked twice, to see that it is one."""
    registry = Registry(bus)
    await registry.refresh()
    card = registry.require(settings.model_name)
    asked = settings.seed, card.context_length, settings.num_tokens
    cases = [*make_cases(*asked), lasting_case(*asked)]
    found = await _ask_all(client, cases)
    stops = [
        with_stop(case, found[case.name][1]) for case in cases if case.name in ("greedy", "seeded")
    ]
    found |= await _ask_all(client, stops)
    again = await _ask_all(client, [case for case, _ in found.values()])
    for name, (_, answer) in found.items():
        if compare(answer, again[name][1]):
            raise ReferenceFailed(f"{name}: two undisturbed answers differ")
    return found


async def _ask_all(client: BusClient, cases: list[Case]) -> dict[str, tuple[Case, Answer]]:
    found = {case.name: (case, Answer(case.sampling.n)) for case in cases}
    async with asyncio.TaskGroup() as tasks:
        for case, answer in found.values():
            tasks.create_task(client.run(case, f"undisturbed-{case.name}", answer))
    for name, (_, answer) in found.items():
        if not answer.is_complete:
            raise ReferenceFailed(f"{name}: {answer.error}: {answer.message}")
    return found


async def _play(
    settings: ChaosSettings, scene: Scene, rounds: Rounds, report: ChaosReport, say: Say
) -> None:
    faults = [FAULTS[name] for name in settings.faults]
    for fault in list(faults):
        if reason := fault().why_not(scene):
            report.notes.append(f"{fault.name} left out: {reason}")
            faults.remove(fault)
    if not faults:
        raise ConfigError("; ".join(report.notes), param="fault")
    planned = plan(faults, settings.count, settings.point, settings.overlap, scene.rng)
    done = 0
    for blows in planned:
        started_s = time.monotonic()
        result = await rounds.play(blows)
        done += len(blows)
        name = "+".join(blow.fault.name for blow in blows)
        tally = report.of(name, blows[0].fault.kind)
        tally.add(result.tally)
        say(f"{done}/{settings.count} {_line(result, time.monotonic() - started_s)}")
        for problem in result.problems:
            say(f"    {problem}")


def _line(result: RoundResult, took_s: float) -> str:
    what = ", ".join(
        f"{blow.fault.name} at {blow.point}{' (missed)' if blow.has_missed else ''}"
        f"{f', {blow.target.name}' if blow.target else ''}"
        for blow in result.blows
    )
    times = result.tally.recoveries_s
    recovery = f", {len(times)} affected, back after {max(times):.2f} s" if times else ""
    verdict = "ok" if result.tally.is_clean else "NOT OK"
    return f"{what}: {result.tally.streams} streams {verdict}{recovery} ({took_s:.1f} s)"


async def _left_over(mesh: ChaosMesh) -> list[Target]:
    """Processes that outlive their mesh."""
    await until(lambda: not mesh.left_over(), _GONE_S)
    return mesh.left_over()
