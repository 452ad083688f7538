"""Whether anything stayed: blocks, leases, running requests, processes."""

from __future__ import annotations

import asyncio
import contextlib
import time

from loadgen.chaos.mesh import POLL_S, ChaosMesh
from loadgen.http_stream import BadHttp, HttpClient
from schemas.control import Beat

_LEASES = b"mesh_leases "
_SCRAPE_S = 2.0
_SLACK_S = 3.0


async def leaked_blocks(mesh: ChaosMesh) -> int:
    """Blocks, or leases without any, that ready workers still hold although nothing runs.

    They have one lease period, and a little, to let go.
    """
    times = mesh.bus.times
    ends_s = time.monotonic() + times.lease_s + times.dead_s + _SLACK_S
    since_s = time.monotonic()
    while True:
        beats = [b for b in mesh.ready("worker") if mesh.is_ready(b.process, since_s)]
        held = sum(_held(beat) for beat in beats)
        if beats and not held:
            held = sum([await _leases(beat) for beat in beats])
            if not held:
                return 0
        if time.monotonic() > ends_s:
            return held
        await asyncio.sleep(POLL_S)


def _held(beat: Beat) -> int:
    load = beat.load
    return max(load.num_blocks - load.num_free_blocks, load.num_running + load.num_waiting)


async def _leases(beat: Beat) -> int:
    """Leases that stand, from the worker's metrics; 0 when it has gone meanwhile."""
    body = bytearray()
    client = HttpClient(f"http://127.0.0.1:{beat.health_port}")
    with contextlib.suppress(OSError, BadHttp, TimeoutError):
        async with asyncio.timeout(_SCRAPE_S):
            await client.get("/metrics", lambda status, data: body.extend(data))
    client.close()
    for line in bytes(body).splitlines():
        if line.startswith(_LEASES):
            return int(float(line.removeprefix(_LEASES)))
    return 0
