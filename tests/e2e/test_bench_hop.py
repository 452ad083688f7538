import asyncio
import json
import sys
from pathlib import Path

MESH = str(Path(sys.executable).with_name("mesh"))


async def test_hops_are_measured_through_a_mesh_of_its_own() -> None:
    """``mesh bench hop --json`` starts a mesh, times each hop, prints JSON only, leaves nothing.

    The limit is wide: it catches a stage that waits for a timer, not a busy machine.
    """
    async with asyncio.timeout(240):
        bench = await asyncio.create_subprocess_exec(
            MESH, "bench", "hop", "--json", "--requests", "30", "--warmup", "3",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await bench.communicate()
    assert (bench.returncode, err) == (0, b"")
    content = json.loads(out)
    for hop in ("bridge_to_prefill_ms", "kv_ready_to_decode_ms", "token_to_client_ms"):
        assert 0 < content[hop]["p50"] <= content[hop]["p99"]
        assert content[hop]["p50"] < 100
    assert content["num_requests"] == 30
    assert content["noise"]["num_cores"] >= 1
