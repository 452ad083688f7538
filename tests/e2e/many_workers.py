"""One process that plays one role for many models: torch is imported once, not once per model.

    python many_workers.py ROLE NAME=FOLDER …

Each worker is the real one (``serve_worker``) with its own connection, engine and thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from infra.bus import Bus
from infra.config import BusConfig, WorkerConfig
from infra.health import Health
from infra.log import make_logger
from infra.metrics import Metrics
from infra.parse import ModelSource
from infra.process import RoleContext
from infra.task_scope import task_scope
from infra.times import Times
from schemas import subjects
from schemas.codec import encode
from workers.service import serve_worker


async def serve_one(role: str, name: str, folder: str, loading: asyncio.Lock) -> None:
    times = Times().scaled(float(os.environ["MESH_TIME_SCALE"]))
    async with await Bus.connect(os.environ["MESH_NATS_URL"], role="worker", times=times) as bus:
        async with task_scope() as tasks:
            process = f"worker-{role}-{name}-{os.getpid()}"
            ctx = RoleContext(
                process=process,
                kind="worker",
                bus=bus,
                times=times,
                health=Health(),
                metrics=Metrics(),
                log=make_logger(process),
                started_unix_ms=int(time.time() * 1000),
            )
            config = WorkerConfig(
                bus=BusConfig(),
                name=f"{role}-{name}",
                role=role,
                model=ModelSource(name, folder),
                dtype="fp32",
                kv_memory=16 << 20,
                block_size=4,
                max_batch_tokens=16,
                max_num_sequences=8,
                threads=1,
            )
            ctx.health.set("worker", False, "starting")
            tasks.create_task(beat(ctx))
            await loading.acquire()  # transformers loads one model at a time
            tasks.create_task(release_when_ready(ctx, loading))
            await serve_worker(ctx, config)


async def beat(ctx: RoleContext) -> None:
    while True:
        await ctx.bus.publish(subjects.beat(ctx.process), encode(ctx.beat()))
        await asyncio.sleep(ctx.times.beat_s)


async def release_when_ready(ctx: RoleContext, loading: asyncio.Lock) -> None:
    while not ctx.health.is_ready:
        await asyncio.sleep(0.01)
    loading.release()


async def main(role: str, models: list[str]) -> None:
    loading = asyncio.Lock()
    async with asyncio.TaskGroup() as tasks:
        for model in models:
            name, _, folder = model.partition("=")
            tasks.create_task(serve_one(role, name, folder, loading))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
