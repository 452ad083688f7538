"""One run: the fleet is started, a trace replayed through the real client, and all is counted."""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.bench.processes import ProcessGroup
from loadgen.recorder import Recorder
from loadgen.run import run_load
from loadgen.settings import MAX_DURATION_S, MAX_IN_FLIGHT, LoadSettings
from loadgen.simulate_bus.mesh import fleet_mesh
from loadgen.simulate_bus.model import FIRST_ID, VOCAB_SIZE
from loadgen.simulate_bus.settings import MODEL, BusRun
from loadgen.traces import write_trace
from schemas.errors import ConfigError
from workers.crew.figures import WorkerFigures

_TIMEOUT_S = 600.0  # of one request


@dataclass(slots=True, kw_only=True)
class Ran:
    """What came of a run, as far as it came. CPU times are seconds of the machine, while requests
    ran; the recorder's times are the fleet's in the end, see :func:`fleet_time`."""

    settings: LoadSettings
    recorder: Recorder = field(default_factory=Recorder)
    start_s: float = 0.0  # until all workers were ready
    wall_s: float = 0.0  # of the machine
    cpu_s: dict[str, float] = field(default_factory=dict)
    workers: tuple[WorkerFigures, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_measured(self) -> bool:
        """Whether there is anything to report."""
        return self.recorder.started_s is not None


async def run_fleet(
    run: BusRun,
    folder: Path,
    ran: Ran,
    on_tick: Callable[[Recorder], None],
    say: Callable[[str], None],
) -> None:
    """Run the fleet in ``folder`` and fill ``ran``, also when this is cancelled in the middle.

    Raises:
        ChildFailed: the fleet can't start.
        WarmupFailed: it does not answer.
        ConfigError: the trace can't be read.
    """
    began_s = time.monotonic()
    say(f"starting {len(run.workers)} workers in {len(run.crews)} processes")
    async with fleet_mesh(run, folder) as mesh:
        ran.start_s = time.monotonic() - began_s
        trace = folder / "trace.jsonl"
        write_trace(run.trace, trace)
        ran.settings = load_settings(run, mesh.client_url, trace)
        say(f"ready after {ran.start_s:.1f} s; replaying {len(run.trace)} requests")
        before = await mesh.figures_now()
        processes = ProcessGroup(mesh.pids | {"generator": [os.getpid()]})
        cpu_s = processes.cpu_s()
        try:
            await run_load(ran.settings, ran.recorder, on_tick)
        finally:
            ran.wall_s = ran.recorder.wall_s
            with contextlib.suppress(ConfigError):  # a process ended meanwhile; the notes tell
                ran.cpu_s = processes.since(cpu_s)
            after = await mesh.figures_now()
            ran.workers = tuple(_part(one, before.get(one.name)) for one in after.values())
            ran.notes = mesh.notes
            fleet_time(ran.recorder, run.options.speed)


def _part(after: WorkerFigures, before: WorkerFigures | None) -> WorkerFigures:
    """What was done meanwhile; of a worker whose process was started again, all that is left."""
    if before is None or before.num_steps > after.num_steps:
        return after
    return after.since(before)


def load_settings(run: BusRun, url: str, trace: Path) -> LoadSettings:
    """The load of a run as ``mesh load`` would be told it.

    Raises:
        ConfigError: a value that can't be used.
    """
    options = run.options
    return LoadSettings(
        target=url,
        model=MODEL,
        trace=trace,
        trace_speed=options.speed,
        trace_scale=options.trace_scale,
        max_len=run.context_length - 1,
        drain_s=min(MAX_DURATION_S, options.drain_s / options.speed),
        timeout_s=_TIMEOUT_S,
        vocab=(FIRST_ID, VOCAB_SIZE),
        max_in_flight=MAX_IN_FLIGHT,
        seed=options.seed,
        slo_ms=run.slo_ms,
    )


def fleet_time(recorder: Recorder, speed: float) -> None:
    """Turn all times of ``recorder`` into those of a fleet that ran ``speed`` times as fast as
    the one it stands for: each moment is so much further from the start."""
    if recorder.started_s is None or speed == 1.0:
        return
    start_s = recorder.started_s

    def moment(at_s: float) -> float:
        return start_s + (at_s - start_s) * speed

    for result in recorder.results:
        result.sent_s = moment(result.sent_s)
        result.due_s = None if result.due_s is None else moment(result.due_s)
        result.end_s = None if result.end_s is None else moment(result.end_s)
        result.event_s = array("d", map(moment, result.event_s))
    if recorder.ended_s is not None:
        recorder.ended_s = moment(recorder.ended_s)
