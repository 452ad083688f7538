"""The load and the figures of ``mesh bench serve``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest
from typer.testing import CliRunner

from infra.cli import app
from loadgen.bench.serve import make_result
from loadgen.bench.serve_load import (
    NUM_RUNNING,
    Interference,
    Server,
    ServeRun,
    ServeSettings,
    run_interference,
    run_streams,
)
from loadgen.bench.stream import LoadFailed
from loadgen.machine import MachineNote
from schemas.errors import ConfigError
from tests.loadgen.sse_server import SseServer, refusal, sse_server

MACHINE = MachineNote(num_cores=2, load_1min=0.1, is_busy=False, system="s", python="3")
GOOD: dict[str, Any] = {
    "model": "m=m",
    "dtype": "auto",
    "streams": (2,),
    "repeats": 1,
    "requests_per_stream": 2,
    "input_len": 5,
    "output_len": 4,
    "vocab": (10, 300),
    "long_prompt": 50,
    "num_cores": 2,
}


def run(output_tok_s: float, ttft_p50_ms: float, itl_p50_ms: float) -> ServeRun:
    return ServeRun(output_tok_s=output_tok_s, ttft_p50_ms=ttft_p50_ms, itl_p50_ms=itl_p50_ms)


def gaps(p50_ms: float, p99_ms: float) -> Interference:
    return Interference(itl_p50_ms=p50_ms, itl_p99_ms=p99_ms, prompts_per_s=2.0)


def test_ratios_are_medians_of_pairs() -> None:
    """Runs that followed each other are compared, so that a busy moment hits both."""
    runs = {
        "both": {2: [run(20, 10, 4), run(40, 10, 4), run(30, 10, 4)]},
        "split": {2: [run(10, 30, 2), run(10, 30, 2), run(10, 30, 2)]},
        "peer": {2: [run(10, 20, 8), run(10, 20, 8), run(5, 20, 8)]},
    }
    interfered = {"both": [gaps(5, 100), gaps(5, 80)], "split": [gaps(4, 40), gaps(6, 16)]}
    settings = ServeSettings(**GOOD)
    shown = make_result(settings, runs, interfered, MACHINE, "http://peer").figures
    assert shown["bridge"] == {
        "both_2_output": 4.0,
        "both_2_ttft": 0.5,
        "both_2_itl": 0.5,
        "split_2_output": 1.0,
        "split_2_ttft": 1.5,
        "split_2_itl": 0.25,
    }
    assert shown["both_2"] == {"output_tok_s": 30, "ttft_p50_ms": 10, "itl_p50_ms": 4}
    assert shown["interference_itl_p99_ratio"] == pytest.approx((0.4 + 0.2) / 2)
    assert shown["interference_itl_p99_ms"] == {"both": 90, "split": 28}


def test_without_peer_and_long_prompts_only_ours_is_shown() -> None:
    """No ratio is made of nothing."""
    runs = {name: {2: [run(20, 10, 4)]} for name in ("both", "split")}
    settings = ServeSettings(**GOOD | {"long_prompt": 0})
    shown = make_result(settings, runs, {"both": [], "split": []}, MACHINE).figures
    assert set(shown) == {"both_2", "split_2"}


async def test_streams_ask_for_answers_of_one_length() -> None:
    """As many requests as streams times requests, and warm-up; every turn has prompts of its
    own."""
    settings = ServeSettings(**GOOD)
    async with sse_server(SseServer()) as fake:
        server = Server(name="both", url=fake.url, model="m")
        for turn in range(2):
            found = await run_streams(settings, server, 2, turn)
            assert min(found.output_tok_s, found.ttft_p50_ms) > 0
    assert len(fake.bodies) == 2 * (4 + 2)
    assert {len(body["prompt"]) for body in fake.bodies} == {5}
    assert {body["max_tokens"] for body in fake.bodies} == {4}
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == len(fake.bodies)


async def test_a_refused_stream_ends_the_bench() -> None:
    """With the server's own words; no figure is made of what is left."""
    async with sse_server(SseServer(refusal=refusal(429, "too many"))) as fake:
        server = Server(name="both", url=fake.url, model="m")
        with pytest.raises(Exception, match="too many"):
            await run_streams(ServeSettings(**GOOD), server, 1, 0)


@dataclass
class TwoKinds(SseServer):
    """Holds streams until the third long prompt has come: the second was answered then."""

    num_long: int = 0
    third_came: asyncio.Event = field(default_factory=asyncio.Event)

    def _pieces(self, body: dict[str, Any], is_chat: bool) -> list[bytes]:
        self.num_long += len(body["prompt"]) == GOOD["long_prompt"]
        if self.num_long == 3:
            self.third_came.set()
        return super()._pieces(body, is_chat)

    async def _stream(self, pieces: list[bytes]) -> AsyncGenerator[bytes, None]:
        if len(pieces) > 10:
            await self.third_came.wait()
        async for piece in super()._stream(pieces):
            yield piece


async def test_long_prompts_arrive_as_long_as_streams_run() -> None:
    """Both are asked for at the same time; the long ones end with the last stream."""
    async with sse_server(TwoKinds()) as fake:
        server = Server(name="both", url=fake.url, model="m")
        found = await run_interference(ServeSettings(**GOOD), server, 0)
    assert found.itl_p99_ms >= found.itl_p50_ms >= 0
    assert found.prompts_per_s > 0
    streams = [body for body in fake.bodies if body["max_tokens"] > 1]
    assert len(streams) == NUM_RUNNING + 1  # one of them is the warm-up


async def test_long_prompts_that_fail_end_the_bench() -> None:
    """What ran beside nothing was not disturbed."""

    class RefusesLong(SseServer):
        def _pieces(self, body: dict[str, Any], is_chat: bool) -> list[bytes]:
            pieces = super()._pieces(body, is_chat)
            return pieces if body["max_tokens"] > 1 else pieces[:0]

    async with sse_server(RefusesLong()) as fake:
        server = Server(name="both", url=fake.url, model="m")
        with pytest.raises((LoadFailed, ExceptionGroup)):
            await run_interference(ServeSettings(**GOOD), server, 0)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"streams": ()}, "streams"),
        ({"repeats": 0}, "repeats"),
        ({"output_len": 1}, "output_len"),
        ({"long_prompt": -1}, "long_prompt"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], param: str) -> None:
    """The error names the option."""
    with pytest.raises(ConfigError) as caught:
        ServeSettings(**GOOD | changes)
    assert caught.value.param == param


def test_bad_flags_end_with_two() -> None:
    """Before a mesh is started."""
    result = CliRunner().invoke(app, ["bench", "serve", "--streams", "1,b"])
    assert result.exit_code == 2
    assert "(streams)" in result.stderr
