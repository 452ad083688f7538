"""Where requests spent their time inside a mesh, from the metrics of its processes.

Every process counts seconds by stage; what a run adds to these counts is the difference of two
readings. The processes are found by their heartbeats on the mesh's bus.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from infra.commands.operator import as_control, settings_of_mesh
from infra.status import gather
from loadgen.http_stream import HttpClient
from schemas.errors import MeshError

_SCRAPE_S = 5.0
_STAGES = ("admission", "prefill", "kv-ready", "decode")  # in the order of a request's way
# Histograms, in the order in which they are shown; {stage}: one row for each value of that label.
_ROWS = {
    "mesh_stage_seconds": "{stage} message, from pull to ack",
    "mesh_kv_transfer_seconds": "KV blocks of one handle",
    "mesh_step_seconds": "engine step",
    "mesh_ttft_seconds": "TTFT at the bridge",
    "mesh_e2e_seconds": "whole answer at the bridge",
}

Reading = dict[str, tuple[float, float]]  # row -> how often, seconds in all


class StageTime(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in one stage during a run, in all processes together."""

    num: int
    mean_ms: float
    total_s: float


class ScrapeFailed(MeshError):
    """The metrics of a process of the mesh can't be had."""

    code = "scrape_failed"


async def metrics_urls(data: str) -> list[str]:
    """Where the processes of the mesh in data directory ``data`` show their metrics.

    Raises:
        ConfigError, BusUnavailable: there is no mesh, or it can't be reached.
    """
    async with as_control(settings_of_mesh(None, data, None), "load") as bus:
        status = await gather(bus)
    return [f"http://127.0.0.1:{one.health_port}" for one in status.processes if one.health_port]


async def read_stages(urls: Iterable[str]) -> Reading:
    """How often each stage was passed so far, and how long that took.

    Raises:
        ScrapeFailed: a process does not answer.
    """
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for url in urls:
        for row, num, seconds in _rows(await _scrape(url)):
            sums[row][0] += num
            sums[row][1] += seconds
    return {row: (num, seconds) for row, (num, seconds) in sums.items()}


def stage_times(before: Reading, after: Reading) -> dict[str, StageTime]:
    """What was added between two readings. A process that started anew in between counts from
    nothing again: what is less than before is left out."""
    times = {}
    for row, (num_after, after_s) in sorted(after.items(), key=lambda item: _place(item[0])):
        num_before, before_s = before.get(row, (0.0, 0.0))
        num, total_s = num_after - num_before, after_s - before_s
        if num > 0 and total_s >= 0:
            mean_ms = round(total_s / num * 1e3, 3)
            times[row] = StageTime(num=int(num), mean_ms=mean_ms, total_s=round(total_s, 6))
    return times


def _place(row: str) -> int:
    known = [text.format(stage=stage) for text in _ROWS.values() for stage in _STAGES]
    return known.index(row) if row in known else len(known)


async def _scrape(url: str) -> str:
    pieces: list[bytes] = []
    client = HttpClient(url)
    try:
        async with asyncio.timeout(_SCRAPE_S):
            status = await client.get("/metrics", lambda _, piece: pieces.append(piece))
    except (OSError, TimeoutError, MeshError) as error:
        raise ScrapeFailed(f"{url}/metrics: {error or type(error).__name__}") from error
    finally:
        client.close()
    if status != 200:
        raise ScrapeFailed(f"{url}/metrics answers {status}")
    return b"".join(pieces).decode()


def _rows(text: str) -> Iterable[tuple[str, float, float]]:
    """(row, count, 0) and (row, 0, seconds) for each histogram that is shown."""
    for family in text_string_to_metric_families(text):
        if family.name not in _ROWS:
            continue
        for sample in family.samples:
            row = _ROWS[family.name].format(stage=sample.labels.get("stage", ""))
            if sample.name.endswith("_count"):
                yield row, sample.value, 0.0
            elif sample.name.endswith("_sum"):
                yield row, 0.0, sample.value
