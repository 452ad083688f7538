import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.bench import BENCHES
from loadgen.cli import bench_app, load_app
from tests.loadgen.sse_server import SseServer, refusal, sse_server

# Whoever runs the tests in the background may have SIGINT ignored, which children inherit.
SCRIPT = """
import signal
from loadgen.cli import load_app
signal.signal(signal.SIGINT, signal.default_int_handler)
load_app()
"""
LOAD = (sys.executable, "-c", SCRIPT)


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *LOAD, *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int | None, str, str]:
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("mode", [("--rate", "200"), ("--concurrency", "4")])
async def test_a_run_prints_its_table_and_writes_its_file(
    mode: tuple[str, str], tmp_path: Path
) -> None:
    """Both loops, over HTTP, from flags to file; no progress bar where there is no terminal."""
    path = tmp_path / "report.json"
    async with sse_server(SseServer()) as server:
        process = await start(
            "--target", server.url, *mode, "--requests", "30", "--output-len", "5",
            "--input-len", "8", "--slo", "ttft:5000", "--json", str(path),
        )  # fmt: skip
        code, out, err = await finish(process)
    assert (code, err) == (0, "")
    assert "TTFT" in out
    content = json.loads(path.read_text())
    assert content["summary"]["num_completed"] == 30
    assert content["summary"]["num_output_tokens"] == 150
    assert content["settings"]["input_len"] == 8
    assert len(server.bodies) == 31  # and one to warm up


async def test_ctrl_c_shows_what_was_measured(tmp_path: Path) -> None:
    """SIGINT in the middle: exit code 130, and a whole report of what had ended until then."""
    path = tmp_path / "report.json"
    async with sse_server(SseServer()) as server:
        process = await start(
            "--target", server.url, "--concurrency", "2", "--duration", "60", "--output-len", "3",
            "--json", str(path),
        )  # fmt: skip
        async with asyncio.timeout(60):
            while len(server.bodies) < 20:
                server.first_sent.clear()
                await server.first_sent.wait()
        process.send_signal(signal.SIGINT)
        code, out, err = await finish(process)
    assert (code, err) == (130, "")
    assert "interrupted" in out
    content = json.loads(path.read_text())
    assert content["is_interrupted"] is True
    assert content["summary"]["num_completed"] >= 15


async def test_a_target_that_answers_nothing_ends_the_run_at_once() -> None:
    """The warm-up finds it, and one line says why."""
    async with sse_server(SseServer(refusal=refusal(404, "no such model"))) as server:
        process = await start("--target", server.url, "--rate", "1", "--requests", "5")
        code, out, err = await finish(process)
    assert (code, out) == (1, "")
    assert err.startswith("mesh load: warmup_failed:")
    assert "http_404: no such model" in err
    assert len(server.bodies) == 1


async def test_a_run_without_any_answer_is_no_success() -> None:
    """With errors only, the report is shown and the exit code is 1."""
    async with sse_server(SseServer(refusal=refusal(429, "full"))) as server:
        process = await start(
            "--target", server.url, "--rate", "100", "--requests", "3", "--warmup", "0"
        )
        code, out, _ = await finish(process)
    assert code == 1
    assert "http_429" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "(rate)"),
        (("--rate", "1", "--concurrency", "2"), "(rate)"),
        (("--rate", "-1"), "(rate)"),
        (("--rate", "1", "--target", "nowhere"), "(target)"),
        (("--rate", "1", "--slo", "speed:3"), "(slo)"),
        (("--rate", "1", "--vocab", "9"), "(vocab)"),
        (("--rate", "1", "--json", "/no/such/folder/file"), "(json)"),
        (("--rate", "quick"), "--rate"),
        (("--rate", "1", "--endpoint", "embeddings"), "--endpoint"),
    ],
)
def test_bad_flags_end_with_one_line_and_code_2(flags: tuple[str, ...], message: str) -> None:
    """Whatever can't be used is named before anything is sent."""
    result = CliRunner().invoke(load_app, flags)
    assert result.exit_code == 2
    assert message in result.output


def test_benches_are_listed_and_explained() -> None:
    """``mesh bench`` shows every bench, and each one its flags."""
    listed = CliRunner().invoke(bench_app, ["--help"])
    assert listed.exit_code == 0
    for name in BENCHES:
        assert name in listed.output
        explained = CliRunner().invoke(bench_app, [name, "--help"])
        assert explained.exit_code == 0
        assert "--json" in explained.output
    assert CliRunner().invoke(bench_app, ["no-such-bench"]).exit_code == 2


def test_importing_the_commands_is_light() -> None:
    """``mesh --help`` must not pay for numpy, rich tables or a broker's client."""
    heavy = {"numpy", "nats", "uvloop", "httptools", "torch", "pipeline.client"}
    code = "import sys, loadgen.cli; print(' '.join(sys.modules))"
    loaded = subprocess.run(
        (sys.executable, "-c", code), capture_output=True, text=True, check=True, timeout=30
    )
    assert heavy.isdisjoint(loaded.stdout.split())
