"""What each worker of a crew has done so far, in a file that is written anew when asked for.

All of it counts from the start of the process; who wants a part of the time takes the difference
of two readings.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from infra.metrics import Metrics
from schemas.errors import ConfigError

WRITE_S = 10.0  # a millisecond per worker
_NAMES = (
    "mesh_step_seconds_sum",
    "mesh_step_seconds_count",
    "mesh_tokens_generated_total",
    "mesh_tokens_computed_total",
    "mesh_prompt_source_tokens_total",
    "mesh_stage_handled_total",
)
_TAKEN = "claimed"  # of the outcomes of a stage: the worker has the request
_COMPUTED = "computed"


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's sums. ``prompt_tokens`` are by where their KV came from."""

    name: str
    role: str
    busy_s: float = 0.0
    late_s: float = 0.0  # that steps began later than they could have: the machine was too slow
    num_steps: int = 0
    num_requests: int = 0  # claimed here
    generated_tokens: int = 0
    computed_tokens: int = 0
    prompt_tokens: dict[str, int] = {}

    def since(self, before: WorkerFigures) -> WorkerFigures:
        """What came after ``before``, an earlier reading of the same worker."""
        return WorkerFigures(
            name=self.name,
            role=self.role,
            busy_s=self.busy_s - before.busy_s,
            late_s=self.late_s - before.late_s,
            num_steps=self.num_steps - before.num_steps,
            num_requests=self.num_requests - before.num_requests,
            generated_tokens=self.generated_tokens - before.generated_tokens,
            computed_tokens=self.computed_tokens - before.computed_tokens,
            prompt_tokens={
                source: count - before.prompt_tokens.get(source, 0)
                for source, count in self.prompt_tokens.items()
            },
        )


class CrewFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The whole crew at one moment."""

    monotonic_s: float  # of this machine's clock, which all of its processes share
    workers: tuple[WorkerFigures, ...]


def figures_of(name: str, role: str, metrics: Metrics, late_s: float = 0.0) -> WorkerFigures:
    """A worker's figures, out of its metrics, and what its steps were late in all."""
    sums: dict[str, float] = dict.fromkeys(_NAMES, 0.0)
    prompt: dict[str, int] = {}
    num_requests = 0
    for family in metrics.registry.restricted_registry(_NAMES).collect():
        for sample in family.samples:
            if sample.name == "mesh_prompt_source_tokens_total":
                prompt[sample.labels["source"]] = int(sample.value)
            elif sample.name == "mesh_stage_handled_total":
                num_requests += int(sample.value) * (sample.labels["outcome"] == _TAKEN)
            elif sample.name in sums:
                sums[sample.name] = sample.value
    return WorkerFigures(
        name=name,
        role=role,
        busy_s=sums["mesh_step_seconds_sum"],
        late_s=late_s,
        num_steps=int(sums["mesh_step_seconds_count"]),
        num_requests=num_requests,
        generated_tokens=int(sums["mesh_tokens_generated_total"]),
        computed_tokens=int(sums["mesh_tokens_computed_total"]),
        prompt_tokens=prompt,
    )


async def write_for_ever(path: Path, workers: Callable[[], Sequence[WorkerFigures]]) -> None:
    """Write ``path`` at once, whenever this process gets SIGUSR1, every ten seconds, and once more
    when cancelled.

    Raises:
        ConfigError: it can't be written.
    """
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, asked.set)
    try:
        while True:
            asked.clear()
            _write(path, workers())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await asked.wait()
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        _write(path, workers())


def _write(path: Path, workers: Sequence[WorkerFigures]) -> None:
    figures = CrewFigures(monotonic_s=time.monotonic(), workers=tuple(workers))
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_bytes(msgspec.json.encode(figures))
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}", param=str(path)) from error


def read_figures(path: Path) -> CrewFigures | None:
    """What stands in the file now; None: nothing was written yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CrewFigures)
    except FileNotFoundError:
        return None
