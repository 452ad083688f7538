"""Over the compute budget: who is cut, moved, refused and told when to return. Real processes, a
simulated engine that is slow enough for a pool to stay as it is while the test looks at it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.client import MeshClient
from pipeline.profile_files import format_profile
from schemas.profiles import StepCosts, WorkerProfile
from tests.e2e.harness import Mesh, ask, mesh_of

SLOW = WorkerProfile(
    name="slow",
    kv_tokens=640,
    costs=StepCosts(
        prefill_base_ms=0,
        prefill_token_ms=2,
        prefill_square_ms=0,
        decode_base_ms=200,
        decode_context_ms=0,
        decode_sequence_ms=1,
    ),
)
CLAMP = """
[models.tiny]
over_budget = ["clamp"]
clamp_floor = 16
classes.patient = { ttft_ms = 600000 }
classes.chat = { ttft_ms = 2000 }
shares = { "-1" = 0.01 }
"""
FALLBACK = CLAMP.replace('["clamp"]', '["clamp", "fallback"]\nfallback = "small"')
CHAT, PATIENT = {"x-slo-class": "chat"}, {"x-slo-class": "patient"}
NUM_QUEUED = 100


async def test_what_becomes_of_requests_over_budget(tmp_path: Path, tiny_folder: Path) -> None:
    """One after the other: a clamp while memory is short; then a queue of 40 s, for which a class
    of 2 s is refused with its time, one of 600 s is not, and the same with low priority is; then,
    with another policy and no restart, the fallback's answer under its own name."""
    policies, profile = tmp_path / "policies.toml", tmp_path / "slow.toml"
    policies.write_text(CLAMP)
    profile.write_text(format_profile(SLOW))
    async with mesh_of(tmp_path) as mesh, asyncio.timeout(240), AsyncExitStack() as stack:
        models = [f"--model={name}={tiny_folder}" for name in (mesh.model, "small")]
        await mesh.start("control", "control", *models, f"--policies={policies}")
        await mesh.start("bridge", "bridge", "--port", "0")
        await mesh.start_worker(
            "slow", "both", tiny_folder, "--engine=simulated", f"--profile={profile}"
        )
        small = f"--model=small={tiny_folder}"
        await mesh.start("worker", "small", "--role=both", small, "--engine=simulated")
        await mesh.until_ready()
        bus = await stack.enter_async_context(mesh.client())
        url = f"http://127.0.0.1:{await mesh.bridge_port('bridge')}/v1"
        http = await stack.enter_async_context(
            openai.AsyncOpenAI(api_key="-", base_url=url, max_retries=0)
        )
        await _clamped(mesh, bus, http)
        await _queue(mesh, bus)
        retry_after_s = await _refused(http, CHAT)
        assert 10 < retry_after_s < 60
        async with _asked(http, PATIENT):
            pass
        await _refused(http, PATIENT, priority=-1)
        policies.write_text(FALLBACK)  # read again without a restart
        await _moved(http)
        _look_at_log(mesh)


def _body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": list(range(100)), "max_tokens": 5, "stream": True, **more}


def _asked(http: openai.AsyncOpenAI, headers: dict[str, str], **more: Any) -> Any:
    priority = more.pop("priority", 0)
    create = http.completions.with_streaming_response.create
    return create(**_body(**more), extra_headers=headers, extra_body={"priority": priority})


async def _clamped(mesh: Mesh, bus: MeshClient, http: openai.AsyncOpenAI) -> None:
    """One that holds 300 tokens and more for the rest of the test; the next gets what is left."""
    holder = await bus.submit(
        mesh.request(tuple(range(50)) * 6, max_tokens=200, ignore_eos=True)
    )  # fmt: skip
    await holder.accepted()
    while mesh.beat_of("slow").load.num_free_blocks > 640 // 16 - 19:
        await asyncio.sleep(0.05)
    async with _asked(http, PATIENT, max_tokens=400) as answer:
        assert 16 <= int(answer.headers["x-mesh-clamped-max-tokens"]) < 400
    while True:  # until control has heard that the client of that one left
        try:
            async with _asked(http, PATIENT) as answer:
                assert "x-mesh-clamped-max-tokens" not in answer.headers
                return
        except openai.RateLimitError:
            await asyncio.sleep(0.1)


async def _queue(mesh: Mesh, bus: MeshClient) -> None:
    """Prompts of 0.4 s each, all different, which ask for no times. One is answered first: until
    then nobody knows how long answers are, and none is expected to end."""
    await ask(bus, mesh.request(tuple(range(40)), max_tokens=1, ignore_eos=True))
    for number in range(NUM_QUEUED):
        prompt = (number, number // 2, *range(198))
        stream = await bus.submit(mesh.request(prompt, max_tokens=1, ignore_eos=True))
        await stream.accepted()


async def _refused(http: openai.AsyncOpenAI, headers: dict[str, str], priority: int = 0) -> float:
    """The Retry-After of a refusal."""
    with pytest.raises(openai.RateLimitError) as raised:
        async with _asked(http, headers, priority=priority):
            pass
    assert raised.value.code == "over_budget"
    said = raised.value.response.headers
    exact_s = int(said["retry-after-ms"]) / 1000
    assert exact_s <= int(said["retry-after"]) < exact_s + 1.001
    return exact_s


async def _moved(http: openai.AsyncOpenAI) -> None:
    """What was refused is answered by another model, as soon as control has read its file."""
    create = http.completions.with_raw_response.create
    while True:
        try:
            answer = await create(**_body(stream=False), extra_headers=CHAT)
        except openai.RateLimitError:
            await asyncio.sleep(0.1)
            continue
        assert answer.headers["x-mesh-asked-model"] == "tiny"
        assert answer.parse().model == "small"
        return


def _look_at_log(mesh: Mesh) -> None:
    """Each of the above left its line in control's log, with what was short."""
    log = mesh.roles["control"].log.read_text()
    lines = [json.loads(line) for line in log.splitlines() if '"request_over_budget"' in line]
    seen = {(line["verdict"], line["shortage"]) for line in lines}
    assert {("clamp", "kv"), ("refuse", "ttft"), ("fallback", "ttft")} <= seen
