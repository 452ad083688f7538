"""Benchmarks and client libraries as they come from the package index, against a running mesh.

Each gets an environment of its own, which takes minutes and gigabytes: ``infra/clients_check``
runs these, CI does not.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.conftest import MODEL
from tests.clients.environments import INSTALL_S, environment
from workers.engine.sources import DEFAULT_MODEL, default_cache_dir, resolve_source

pytestmark = [
    pytest.mark.skipif(
        "MESH_TEST_TOOLS" not in os.environ, reason="infra/clients_check installs and runs these"
    ),
    pytest.mark.timeout(INSTALL_S),
]

NUM_REQUESTS = 16
NUM_TOKENS = 16
RUN_S = 600.0
PROGRAMS = Path(__file__).parent / "programs"
QUIET = {"DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="module")
def tokenizer() -> str:
    """The folder of the default model: benchmarks count tokens with what lies there."""
    return str(resolve_source(DEFAULT_MODEL, default_cache_dir(), print))


def run(command: list[str], folder: Path, **env: str) -> str:
    """Run to the end; the standard output. What went wrong is said by the tool itself."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **QUIET, **env},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf(base_url: str, tokenizer: str, tmp_path: Path, endpoint: str) -> None:
    """Streams with exact lengths: no request fails, client and server count the same tokens."""
    command = [
        str(environment("aiperf") / "aiperf"), "profile", "--model", MODEL,
        "--url", base_url.removesuffix("/v1"), "--endpoint-type", endpoint, "--streaming",
        "--tokenizer", tokenizer, "--concurrency", "4", "--request-count", str(NUM_REQUESTS),
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(NUM_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{NUM_TOKENS}",
        "--use-server-token-count", "--artifact-dir", str(tmp_path), "--ui", "none",
    ]  # fmt: skip
    run(command, tmp_path)
    said = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert said["error_summary"] == []
    assert said["request_count"]["avg"] == NUM_REQUESTS
    assert said["request_error_rate"]["avg"] == 0
    assert said["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * NUM_TOKENS
    assert said["osl_mismatch_count"]["avg"] == 0
    assert said["time_to_first_token"]["avg"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(base_url: str, tokenizer: str, tmp_path: Path, path: str) -> None:
    """The same, with usage read from every chunk."""
    target = base_url.removesuffix("/v1")
    command = [
        str(environment("guidellm") / "guidellm"), "run",
        "--backend", f"kind=openai_http,target={target},model={MODEL},request_format={path}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}",
        "--output", f"kind=json,path={tmp_path / 'said.json'}",
        "--disable-console-interactive",
    ]  # fmt: skip
    run(command, tmp_path)
    (said,) = json.loads((tmp_path / "said.json").read_text())["benchmarks"]
    requests = said["requests"]
    assert (requests["errored"], requests["incomplete"]) == ([], [])
    assert [one["output_tokens"] for one in requests["successful"]] == [NUM_TOKENS] * NUM_REQUESTS
    assert all(one["time_to_first_token_ms"] > 0 for one in requests["successful"])
    assert all(one["prompt_tokens"] >= 64 for one in requests["successful"])


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")],
)
def test_vllm_bench_serve(
    base_url: str, tokenizer: str, tmp_path: Path, backend: str, path: str
) -> None:
    """vLLM's own load generator takes the mesh for one of its servers."""
    command = [
        str(environment("vllm") / "vllm"), "bench", "serve", "--backend", backend,
        "--base-url", base_url.removesuffix("/v1"), "--endpoint", path, "--model", MODEL,
        "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "64",
        "--random-output-len", str(NUM_TOKENS), "--num-prompts", str(NUM_REQUESTS),
        "--max-concurrency", "4", "--ignore-eos", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "said.json",
    ]  # fmt: skip
    run(command, tmp_path, HF_HUB_OFFLINE="1")
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["completed"], said["failed"]) == (NUM_REQUESTS, 0)
    assert said["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS
    assert said["mean_ttft_ms"] > 0


def asked(base_url: str, folder: Path, name: str) -> dict[str, Any]:
    """What one of our programs got through its library."""
    python, program = environment(name) / "python", PROGRAMS / f"ask_{name}.py"
    said: dict[str, Any] = json.loads(
        run([str(python), str(program), base_url, MODEL], folder).splitlines()[-1]
    )
    return said


def expected(client: openai.OpenAI) -> tuple[str, str, list[int]]:
    """The same questions through the official client: chat, completion, usage of chat."""
    ask: dict[str, Any] = {"model": MODEL, "seed": 5, "max_tokens": 24}
    question: Any = [{"role": "user", "content": "What is a queue?"}]
    chat = client.chat.completions.create(messages=question, extra_body={"ignore_eos": True}, **ask)
    completion = client.completions.create(prompt="Once", **ask)
    assert chat.usage
    usage = [chat.usage.prompt_tokens, chat.usage.completion_tokens]
    return chat.choices[0].message.content or "", completion.choices[0].text, usage


def test_litellm(base_url: str, client: openai.OpenAI, tmp_path: Path) -> None:
    """Blocking and not, whole and streamed, as OpenAI's and as vLLM's provider: one answer."""
    said = asked(base_url, tmp_path, "litellm")
    text, completion, usage = expected(client)
    assert said["texts"] == [text] * 4
    assert said["usages"] == [usage] * 4
    assert said["reasons"] == [["length"]] * 4
    assert said["completion"] == completion
    assert said["refused"] == "NotFoundError"


def test_langchain(base_url: str, client: openai.OpenAI, tmp_path: Path) -> None:
    """Invoked, streamed, in batches, with a schema."""
    said = asked(base_url, tmp_path, "langchain")
    text, completion, usage = expected(client)
    assert said["texts"] == [text] * 6
    assert said["usages"] == [usage] * 2
    assert said["reasons"] == [["length"]]
    assert said["animal"]["kind"] in ("cat", "dog")
    assert said["animal"]["legs"] in (2, 4)
    assert said["completion"] == completion
