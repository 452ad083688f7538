"""``mesh simulate --bus``, from what was asked to an exit code."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from infra.failure import EXIT_FAILED, EXIT_INTERRUPTED, first_mesh_error, report
from infra.file_limit import raise_file_limit
from loadgen.cli import Outputs
from loadgen.loop import fast_loop
from loadgen.machine import MachineNote
from loadgen.progress import progress_bar
from loadgen.simulate_bus.report import FleetReport, print_fleet, report_of, write_fleet
from loadgen.simulate_bus.run import Ran, load_settings, run_fleet
from loadgen.simulate_bus.settings import BusRun
from schemas.errors import MeshError

_COMMAND = "mesh simulate"


def simulate_on_bus(run: BusRun, outputs: Outputs, logs: Path | None = None) -> int:
    """Run it, show and write the report.

    Args:
        logs: a folder that gets the processes' logs; None: they are thrown away.

    Returns:
        The exit code: 0 when any request was answered.
    """
    machine = MachineNote.now()
    raise_file_limit()
    try:
        ran = Ran(settings=load_settings(run, "nats://127.0.0.1", Path(run.trace_name)))
    except MeshError as error:
        return report(_COMMAND, error)
    code = _run(run, ran, logs)
    if not ran.has_measured:
        return code
    done = report_of(run, ran, machine, is_interrupted=code == EXIT_INTERRUPTED)
    print_fleet(done, Console())
    _write(done, ran, outputs)
    return code or (0 if done.summary.num_completed else EXIT_FAILED)


def _run(run: BusRun, ran: Ran, logs: Path | None) -> int:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with (
            _folder(logs) as folder,
            progress_bar(ran.settings, console) as on_tick,
            asyncio.Runner(loop_factory=fast_loop()) as runner,
        ):
            runner.run(run_fleet(run, folder, ran, on_tick, console.print))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (MeshError, BaseExceptionGroup) as error:
        ours = first_mesh_error(error)
        if ours is None:
            raise
        return report(_COMMAND, ours)
    return 0


@contextmanager
def _folder(logs: Path | None) -> Iterator[Path]:
    """Where the broker and the processes keep what they need, gone afterwards but for the logs."""
    with tempfile.TemporaryDirectory(prefix="mesh-simulate-") as made:
        try:
            yield Path(made)
        finally:
            if logs is not None:
                shutil.copytree(Path(made) / "logs", logs, dirs_exist_ok=True)


def _write(done: FleetReport, ran: Ran, outputs: Outputs) -> None:
    if outputs.json is not None:
        write_fleet(done, outputs.json)
    if outputs.markdown is not None:
        from loadgen.markdown_report import write_markdown

        write_markdown(done, outputs.markdown)
    if outputs.html is not None:
        from loadgen.html_report import write_html

        write_html(done, ran.recorder, outputs.html)
