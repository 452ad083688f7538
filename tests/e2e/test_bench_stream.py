import asyncio
import json
import sys
from pathlib import Path

MESH = str(Path(sys.executable).with_name("mesh"))


async def bench(*words: str) -> dict[str, object]:
    async with asyncio.timeout(200):
        process = await asyncio.create_subprocess_exec(
            MESH, "bench", *words, "--json",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


async def test_streams_are_measured_through_a_mesh_of_its_own() -> None:
    """``mesh bench stream`` counts every token and the CPU of each kind of process."""
    words = ("--streams", "4", "--repeats", "1", "--requests", "1", "--output-len", "8")
    content = await bench("stream", *words)
    assert content["chunks_s"] > 0
    assert 0 < content["ttft_ms"]["p50"] <= content["ttft_ms"]["p99"]
    assert {"bridge", "broker", "control", "worker", "total"} <= content["cpu_us_per_chunk"].keys()


async def test_the_bus_is_measured_up_to_the_brokers_limit() -> None:
    """``mesh bench bus`` times each size over all three ways, and tokens from many to many."""
    content = await bench("bus", "--messages", "10", "--steps", "10")
    hops = {name: value for name, value in content.items() if name[-1].isdigit()}
    assert {name.rsplit("_", 1)[0] for name in hops} == {"work_queue", "core", "tcp"}
    assert max(int(name.rsplit("_", 1)[1]) for name in hops) > 8_000_000
    assert all(0 < hop["p50"] <= hop["p99"] for hop in hops.values())
    assert content["fan"]["tokens_s"] > 0


async def test_a_mesh_at_rest_is_watched() -> None:
    """``mesh bench idle`` has a figure for each kind of process and their sum."""
    content = await bench("idle", "--seconds", "1")
    percent = content["percent_of_a_core"]
    parts = sum(value for kind, value in percent.items() if kind != "total")
    assert abs(parts - percent["total"]) < 0.1
