"""The mesh that ``mesh bench stream`` measures, and how it is set."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen.bench.own_mesh import own_mesh
from loadgen.bench.processes import ProcessGroup, processes_of_mesh
from pipeline.profile_files import format_profile
from schemas.errors import ConfigError
from schemas.profiles import WorkerProfile
from workers.engine.simulated import DEFAULT_COSTS

MODEL = "smollm2-135m"
_MAX_STREAMS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What to send: ``streams`` are numbers of streams at a time, each measured by itself; and what
    the simulated worker keeps: as much as the one of NVIDIA Dynamo, which is the usual peer, and in
    blocks as large, so that both have the same books to keep. Of control processes there is one, as
    that peer has one frontend; ``mesh up`` by itself makes two.

    Raises:
        ConfigError: a number out of its range.
    """

    streams: tuple[int, ...]
    repeats: int
    requests_per_stream: int
    input_len: int
    output_len: int
    speed: float
    is_split: bool
    controls: int = 1
    block_size: int = 64
    kv_tokens: int = 16_384 * 64
    kv_host_memory: int = 0

    def __post_init__(self) -> None:
        if not self.streams:
            raise ConfigError("give --streams", param="streams")
        numbers = {
            "streams": (min(self.streams), 1, _MAX_STREAMS),
            "repeats": (self.repeats, 1, 100),
            "requests": (self.requests_per_stream, 1, 1000),
            "input_len": (self.input_len, 1, 1000),
            "output_len": (self.output_len, 1, 1000),
            "speed": (self.speed, 0.1, 1000),
            "controls": (self.controls, 1, 8),
        }
        for name, (value, least, most) in numbers.items():
            if not least <= value <= most:
                raise ConfigError(f"{name} is not within {least} and {most}", param=name)
        if max(self.streams) > _MAX_STREAMS:
            raise ConfigError(f"streams is not within 1 and {_MAX_STREAMS}", param="streams")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Who is measured."""

    name: str
    url: str
    model: str
    processes: ProcessGroup


@asynccontextmanager
async def own_server(settings: StreamSettings) -> AsyncGenerator[Server, None]:
    """A mesh of its own with one simulated worker, or two, while the block runs.

    Raises:
        MeshNotStarted: it did not become ready.
    """
    workers = ("--prefill", "1", "--decode", "1") if settings.is_split else ("--both", "1")
    with tempfile.TemporaryDirectory(prefix="mesh-bench-") as folder:
        env = _worker_env(settings, Path(folder))
        flags = ("--engine", "simulated", "--controls", str(settings.controls), *workers)
        async with own_mesh(flags, env) as mesh:
            processes = processes_of_mesh(mesh.pid)
            yield Server(name="mesh", url=mesh.url, model=MODEL, processes=processes)


def _worker_env(settings: StreamSettings, folder: Path) -> dict[str, str]:
    """The usual costs, but the room that the settings say: that is in a profile."""
    profile = WorkerProfile(name="bench-stream", costs=DEFAULT_COSTS, kv_tokens=settings.kv_tokens)
    file = folder / "profile.toml"
    file.write_text(format_profile(profile))
    batch = max(64, *settings.streams)
    return {
        "MESH_WORKER_SPEED": f"{settings.speed:g}",
        "MESH_WORKER_MAX_NUM_SEQUENCES": str(batch),
        "MESH_WORKER_MAX_BATCH_TOKENS": str(max(8192, batch)),
        "MESH_WORKER_BLOCK_SIZE": str(settings.block_size),
        "MESH_WORKER_KV_HOST_MEMORY": str(settings.kv_host_memory),
        "MESH_WORKER_PROFILE": str(file),
    }
