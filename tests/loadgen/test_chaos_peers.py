"""Chaos against somebody else's server: a small one here, killed and frozen for real."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from loadgen.chaos.mesh import until
from loadgen.peers_chaos import PeerSettings, run_peer_chaos
from schemas.errors import ConfigError

ROOT = Path(__file__).parents[2]
SERVER = """
import asyncio, itertools, json, random, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

IS_RANDOM = sys.argv[2] == "random"

def event(content):
    return b"data: " + json.dumps(content).encode() + b"\\n\\n"

async def answer(request):
    body = await request.json()
    async def send():
        for number in range(body["max_tokens"]):
            for index in range(body["n"]):
                text = random.choice("ab") if IS_RANDOM else chr(97 + number % 26)
                choice = {"index": index, "text": text, "finish_reason": None}
                yield event({"id": "cmpl-1", "choices": [choice]})
            await asyncio.sleep(0.015)
        for index in range(body["n"]):
            choice = {"index": index, "text": "", "finish_reason": "length"}
            yield event({"choices": [choice]})
        usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"] * body["n"]}
        yield event({"choices": [], "usage": usage})
        yield b"data: [DONE]\\n\\n"
    return StreamingResponse(send(), media_type="text/event-stream")

app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", ws="none")
"""


@asynccontextmanager
async def serving(port: int, how: str) -> AsyncGenerator[int, None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(port), how, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        listens = await until(lambda: _listens(process.pid, port), 20)
        assert listens, "the test's own server did not start"
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _listens(pid: int, port: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections)


def settings(port: int, pid: int, *verbs: str, **changes: object) -> PeerSettings:
    values: dict[str, object] = {
        "url": f"http://127.0.0.1:{port}", "model": "m", "pids": {"server": pid}, "verbs": verbs,
        "count": len(verbs), "num_streams": 4, "num_tokens": 40, "freeze_s": 0.5, "timeout_s": 10.0,
        "settle_s": 0.5,
    }  # fmt: skip
    return PeerSettings(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["same", "random"])
async def test_a_freeze_is_waited_out_and_a_kill_fails_what_ran(
    how: str, unused_tcp_port: int
) -> None:
    """Frozen: every stream is whole, later. Killed: it can't resume, and is started again as it
    was. Where answers are random their tokens are counted."""
    port = unused_tcp_port
    async with serving(port, how) as pid, asyncio.timeout(240):
        report = await run_peer_chaos(
            settings(port, pid, "freeze", "kill", restarts=True), Console(quiet=True)
        )
    frozen, killed = report.by_fault["freeze-server"], report.by_fault["kill-server"]
    assert frozen.is_clean
    assert (frozen.faults, frozen.streams) == (1, 4)
    assert 0.4 < min(frozen.recoveries_s) < 5
    assert killed.failed_requests > 0
    assert killed.lost_tokens == killed.wrong_tokens == 0
    is_counted = any("counted" in note for note in report.notes)
    assert is_counted is (how == "random")
    assert not any("ended" in note for note in report.notes)  # it came back
    assert not [one for one in psutil.Process().children() if _listens_quietly(one.pid, port)]


def _listens_quietly(pid: int, port: int) -> bool:
    try:
        return _listens(pid, port)
    except psutil.NoSuchProcess:
        return False


def test_a_pid_that_nobody_has_is_refused() -> None:
    """And a verb that is none."""
    with pytest.raises(ConfigError, match="no verb"):
        settings(1, 1, "shout")


async def test_a_process_that_does_not_exist_is_refused() -> None:
    """Before anything is sent."""
    free = max(psutil.pids()) + 100_000
    with pytest.raises(ConfigError, match="no process"):
        await run_peer_chaos(settings(1, free, "kill"), Console(quiet=True))
