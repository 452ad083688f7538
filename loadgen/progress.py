"""The progress bar of a load run, on a terminal; elsewhere it stays silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from loadgen.recorder import Recorder
from loadgen.settings import MAX_REQUESTS, LoadSettings


@contextmanager
def progress_bar(settings: LoadSettings, console: Console) -> Iterator[Callable[[Recorder], None]]:
    """Show a bar while the block runs; call what it yields with the recorder now and then."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("warm-up", total=1.0, state="")

        def update(recorder: Recorder) -> None:
            if recorder.started_s is not None:
                progress.update(
                    task,
                    description="load",
                    completed=_done_share(settings, recorder),
                    state=_state(recorder),
                )

        yield update


def _done_share(settings: LoadSettings, recorder: Recorder) -> float:
    by_time = recorder.wall_s / settings.duration_s
    by_count = recorder.num_ended / min(settings.num_requests, MAX_REQUESTS)
    return min(1.0, max(by_time, by_count))


def _state(recorder: Recorder) -> str:
    tokens_per_s = recorder.num_output_tokens / max(recorder.wall_s, 1e-9)
    return (
        f"{recorder.num_in_flight} in flight, {recorder.num_ended} ended, "
        f"{recorder.num_failed} failed, {tokens_per_s:.0f} tokens/s"
    )
