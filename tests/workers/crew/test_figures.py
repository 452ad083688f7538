"""What a crew's workers have done, as a file."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from infra.metrics import Metrics
from schemas.errors import ConfigError
from workers.crew.figures import figures_of, read_figures, write_for_ever


def busy_metrics() -> Metrics:
    metrics = Metrics()
    metrics.step_seconds.observe(0.25)
    metrics.step_seconds.observe(0.5)
    metrics.tokens_generated.inc(7)
    metrics.tokens_computed.inc(90)
    metrics.prompt_source_tokens.labels("computed").inc(80)
    metrics.prompt_source_tokens.labels("device").inc(16)
    metrics.stage_handled.labels("prefill", "claimed").inc(3)
    metrics.stage_handled.labels("prefill", "superseded").inc(2)
    return metrics


def test_figures_are_those_of_the_metrics() -> None:
    """Busy time is that of steps; a task that another had claimed is none of its requests."""
    found = figures_of("p", "prefill", busy_metrics())
    assert (found.busy_s, found.num_steps, found.num_requests) == (0.75, 2, 3)
    assert (found.generated_tokens, found.computed_tokens) == (7, 90)
    assert found.prompt_tokens == {"computed": 80, "device": 16}


def test_a_part_of_the_time_is_a_difference() -> None:
    """Sources that came up meanwhile count from nothing."""
    metrics = busy_metrics()
    before = figures_of("p", "prefill", metrics)
    metrics.step_seconds.observe(1.0)
    metrics.prompt_source_tokens.labels("host").inc(4)
    part = figures_of("p", "prefill", metrics).since(before)
    assert (part.busy_s, part.num_steps, part.num_requests) == (1.0, 1, 0)
    assert part.prompt_tokens == {"computed": 0, "device": 0, "host": 4}


def tokens_in(path: Path) -> list[int]:
    found = read_figures(path)
    assert found is not None
    return [one.generated_tokens for one in found.workers]


async def test_the_file_is_whole_and_written_when_asked_for_and_at_the_end(tmp_path: Path) -> None:
    """A reader who wants to know it now sends SIGUSR1."""
    path, metrics = tmp_path / "figures.json", Metrics()
    assert read_figures(path) is None
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(
            write_for_ever(path, lambda: [figures_of("p", "prefill", metrics)])
        )
        async with asyncio.timeout(60):
            while read_figures(path) is None:
                await asyncio.sleep(0)
        metrics.tokens_generated.inc(3)
        os.kill(os.getpid(), signal.SIGUSR1)
        async with asyncio.timeout(60):
            while tokens_in(path) != [3]:
                await asyncio.sleep(0)
        metrics.tokens_generated.inc(2)
        writing.cancel()
    assert tokens_in(path) == [5]
    assert os.listdir(tmp_path) == ["figures.json"]


async def test_a_place_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    """A run whose figures are lost must not look like one without work."""
    with pytest.raises(ConfigError, match="can't be written"):
        await write_for_ever(tmp_path / "none" / "figures.json", lambda: [])
