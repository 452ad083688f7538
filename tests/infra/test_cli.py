"""The command line: fast to start, the same settings everywhere, errors in one line."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from infra.bus import Bus, EmbeddedBroker
from infra.cli import COMMANDS, app
from infra.config import BridgeConfig, BusConfig, ControlConfig, WorkerConfig
from infra.settings import Configured, settings_of, variable
from infra.task_scope import task_scope
from schemas import subjects
from schemas.codec import encode
from schemas.control import Beat, DeadLetter, Load
from schemas.models import ModelCard

MESH = Path(sys.executable).with_name("mesh")
HEAVY = ("torch", "transformers", "nats", "numpy", "starlette", "uvicorn", "httpx", "asyncio")


def mesh(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MESH), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "COLUMNS": "200", **env},
    )


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    """`mesh` reads its table; what a subcommand needs is imported when it runs."""
    code = f"import infra.cli, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """`mesh NAME --help` works and says something."""
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert f"Usage: mesh {name}" in shown.output


@pytest.mark.parametrize(
    ("name", "kind"),
    [("control", ControlConfig), ("worker", WorkerConfig), ("bridge", BridgeConfig)],
)
def test_a_role_takes_all_its_settings_as_flags(name: str, kind: type[Configured]) -> None:
    """And its help names the variable of each."""
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "400"}).output
    for one_kind in (kind, BusConfig):
        for one, found in settings_of(one_kind):
            assert f"{found.flag} " in shown
            assert variable(one_kind.table, one.name) in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["worker", "--threads", "many"], "mesh worker: config_error: --threads: 'many' is no"),
        (["up", "--model", "="], "mesh up: config_error: --model: '=' is not NAME=SOURCE"),
        (["up", "--prefill", "0"], "mesh up: config_error: no worker would do prefill"),
        (["bridge", "--config", "/none.toml"], "mesh bridge: config_error: can't read /none.toml"),
        (["bridge", "--data", "/none"], "mesh bridge: config_error: no broker: no mesh runs in /n"),
        (["status", "--data", "/none"], "mesh status: config_error: no broker: no mesh runs in /n"),
        (["generate", "x", "--data", "/none"], "mesh generate: config_error: no broker: no mesh"),
        (["prepare", "/none/model.gguf"], "mesh prepare: config_error: /none/model.gguf: no such"),
        (["control", "--model", "m=/none"], "mesh control: config_error: /none: neither a model"),
        (["worker", "--model", "m=/none"], "mesh worker: config_error: /none: neither a model"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    """Code, message, key; no traceback."""
    ended = mesh(*arguments)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(words)
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "x"], ["status"], ["dead", "list"]])
def test_a_broker_that_is_not_there_is_one_line(command: list[str]) -> None:
    """A person is told where nobody answers, and nothing else."""
    ended = mesh(*command, "--nats", "nats://client:x@127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    assert "no connection to the bus at 127.0.0.1:1: not reachable" in line


def test_a_variable_with_a_mistake_is_said() -> None:
    """Variables are checked as flags are."""
    ended = mesh("worker", MESH_WORKER_DTYPE="int3")
    assert ended.returncode == 2
    assert ended.stderr.startswith("mesh worker: config_error: MESH_WORKER_DTYPE: 'int3' is none")


def test_a_broker_that_is_not_there_is_said_without_its_password() -> None:
    """Where and why; exit code 1, since asking again later may help."""
    ended = mesh("status", "--nats", "nats://u:secret@127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("mesh status: bus_unavailable: no connection to the bus at 127.")
    assert "secret" not in ended.stderr


async def test_status_lists_processes_models_and_queues(broker: EmbeddedBroker, bus: Bus) -> None:
    """What beats, what is registered, what waits; as tables and as JSON."""
    served = subjects.served("org/m.1", "abc")
    card = ModelCard(
        name="org/m.1",
        revision="abc",
        served=served,
        folder="/m",
        architecture="llama",
        context_length=8192,
        vocab_size=100,
        has_chat_template=True,
        created_unix_s=1,
    )
    await bus.publish_stored(f"$KV.mesh_models.{subjects.encode_name(card.name)}", encode(card))
    await bus.publish_stored(subjects.prefill(served, "w1"), b"task")
    await bus.publish_stored(subjects.prefill(served, "w1"), b"task")
    await bus.publish_stored(subjects.admission("org/m.1"), b"request")
    letter = DeadLetter(subject="x", reason="y", code="z", payload=b"")
    await bus.publish_stored(subjects.DEAD, encode(letter))
    beat = Beat(process="worker-w-1", kind="worker", state="ready", host="h", pid=7, worker="w1",
                started_unix_ms=1, roles=("prefill",), served=served, engine="simulated",
                load=Load(num_running=3, num_blocks=10, num_free_blocks=4))  # fmt: skip
    gone = msgspec.structs.replace(beat, process="worker-w-0", state="gone")
    env = {"MESH_NATS_URL": broker.url("control"), "MESH_TIME_SCALE": "0.5"}

    async def shown(*flags: str) -> str:
        async with task_scope() as tasks:
            tasks.create_task(_repeat(bus, beat, gone))
            ended = await asyncio.to_thread(mesh, "status", *flags, **env)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    found = json.loads(await shown("--json"))
    assert [process["process"] for process in found["processes"]] == ["worker-w-1"]
    assert [model["name"] for model in found["models"]] == ["org/m.1"]
    assert {(q["stage"], q["model"], q["worker"], q["num_messages"]) for q in found["queues"]} == {
        ("prefill", "org/m.1", "w1", 2),
        ("admission", "org/m.1", "", 1),
    }
    assert found["num_dead_letters"] == 1
    table = await shown()
    assert re.search(r"w1 +ready +prefill +org/m\.1 +simulated +3 +0 +4 of 10 +7", table)
    assert re.search(r"org/m\.1 +abc +llama +8192", table)
    assert "dead letters: 1" in table


async def _repeat(bus: Bus, *beats: Beat) -> None:
    while True:
        for beat in beats:
            await bus.publish(subjects.beat(beat.process), encode(beat))
        await asyncio.sleep(0.05)


async def test_status_of_a_bus_without_a_mesh_is_said(broker: EmbeddedBroker) -> None:
    """A broker is there, but nobody has made the streams."""
    env = {"MESH_NATS_URL": broker.url("control"), "MESH_TIME_SCALE": "0.1"}
    ended = await asyncio.to_thread(mesh, "status", **env)
    assert ended.returncode == 2
    assert ended.stderr.startswith("mesh status: config_error: no mesh uses the bus at 127.0.0.1:")


async def test_dead_letters_are_listed_shown_retried_and_dropped(
    broker: EmbeddedBroker, bus: Bus
) -> None:
    """By their number in the stream, or all of them; what is refused is said and fails."""
    env = {"MESH_NATS_URL": broker.url("control")}
    payload = json.dumps({"schema": "inference-request/1", "model": "m", "prompt": "a secret",
                          "request_id": "request-1"}).encode()  # fmt: skip
    for subject in (subjects.admission("m"), subjects.prefill("m@r"), subjects.prefill("m@r")):
        letter = DeadLetter(subject=subject, reason="[why]", code="engine_failed", stage="s",
                            payload=payload, payload_bytes=len(payload))  # fmt: skip
        await bus.publish_stored(subjects.DEAD, encode(letter))

    async def dead(*arguments: str, code: int = 0) -> str:
        ended = await asyncio.to_thread(mesh, "dead", *arguments, **env)
        assert ended.returncode == code, ended.stderr
        return ended.stdout + ended.stderr

    listed = json.loads(await dead("list", "--json"))
    assert [(one["id"], one["request_id"]) for one in listed] == [
        (1, "request-1"), (2, "request-1"), (3, "request-1"),
    ]  # fmt: skip
    assert "engine_failed" in await dead("list")
    assert "[why]" in await dead("list")
    assert "secret" not in await dead("show", "1")
    assert json.loads(await dead("show", "1", "--payload", "--json"))["payload"]["prompt"]
    assert await dead("retry", "1") == "1 retried request-1\n"
    assert "invalid_request: " in await dead("retry", "2", "1", code=2)
    assert "--all" in await dead("drop", code=2)
    await dead("drop", "--all", code=1)  # nobody says yes
    outcomes = json.loads(await dead("drop", "--all", "--yes", "--json"))
    assert [(one["id"], one["outcome"]) for one in outcomes] == [(2, "dropped"), (3, "dropped")]
    assert "no dead letters" in await dead("list")
