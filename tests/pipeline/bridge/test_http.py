"""The HTTP side: status codes, headers, errors in OpenAI's shape, bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pipeline.bridge.limits import Limits
from schemas.errors import (
    BusUnavailable,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MeshError,
    ModelNotFound,
    PayloadTooLarge,
    QueueFull,
)
from schemas.requests import InferenceRequest
from tests.pipeline.bridge.fake import (
    CARD,
    MODEL,
    NOW_UNIX_MS,
    WORDS,
    FakeClient,
    House,
    Script,
    build,
    chat,
    completion,
    say,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def browser(house: House) -> httpx.AsyncClient:
    """An HTTP client of the application itself, without sockets."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(house.bridge), base_url="http://mesh")


async def post(house: House, path: str, body: object, **headers: str) -> httpx.Response:
    async with browser(house) as client:
        return await client.post(path, json=body, headers=headers)


def refusing(error: MeshError) -> FakeClient:
    return FakeClient(lambda _: Script(steps=[], end=None, refusal=error))


def failing(error: MeshError) -> FakeClient:
    """A mesh that fails after two tokens."""

    def script(request: InferenceRequest) -> Script:
        said = say(request)
        return Script(steps=[*said.steps[:2], error], end=None)

    return FakeClient(script)


def log_lines(house: House) -> list[dict[str, Any]]:
    return [json.loads(line) for line in house.output.getvalue().splitlines()]


async def test_a_whole_chat_answer() -> None:
    """The answer has OpenAI's fields, the text, the reason and the exact usage."""
    house = build()
    response = await post(house, CHAT, chat())
    (request,) = house.client.requests
    answer = response.json()
    assert response.status_code == 200
    assert answer["id"] == f"chatcmpl-{request.request_id}"
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(WORDS), "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    await house.all_closed()
    assert house.client.streams[0].cancelled == []


async def test_a_batch_numbers_choices_by_prompt_and_sums_usage() -> None:
    """Two prompts with n=2 are four choices in order; each prompt is a request of its own."""
    house = build(FakeClient(lambda request: say(request, [f"{request.prompt}!", "?"])))
    response = await post(house, COMPLETIONS, completion(prompt=["a", "b"], n=2, echo=True))
    answer = response.json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in answer["choices"]] == ["aa!?", "aa!?", "bb!?", "bb!?"]
    assert answer["usage"]["prompt_tokens"] == 10
    assert answer["usage"]["completion_tokens"] == 8
    assert len({request.request_id for request in house.client.requests}) == 2


async def test_logprobs_in_whole_answers() -> None:
    """Asked for, every token has its logprob, in the form of each endpoint."""
    house = build()
    in_chat = (await post(house, CHAT, chat(logprobs=True, top_logprobs=2))).json()
    entries = in_chat["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == list(WORDS)
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 4
    plain = (await post(house, COMPLETIONS, completion(logprobs=1))).json()
    assert plain["choices"][0]["logprobs"]["tokens"] == list(WORDS)
    assert plain["choices"][0]["logprobs"]["text_offset"] == [0, 5, 11, 13]


async def test_logprobs_of_prompt_and_answer() -> None:
    """With ``echo``, per choice: the prompt's tokens, the first without a logprob, then the
    answer's; streamed, the same in the order of the chunks."""
    house = build()
    body = completion(prompt=["ab", "xyz"], n=2, echo=True, logprobs=1)
    choices = (await post(house, COMPLETIONS, body)).json()["choices"]
    for choice, prompt in zip(choices, ["ab", "ab", "xyz", "xyz"], strict=True):
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert found["tokens"] == [*prompt, *WORDS]
        assert found["token_logprobs"] == [None, *[-0.5] * (len(prompt) + 3)]
        assert found["top_logprobs"][0] is None
        assert all(
            top[token] == -0.5
            for top, token in zip(found["top_logprobs"][1:], found["tokens"][1:], strict=True)
        )
        starts = [len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))]
        assert found["text_offset"] == starts
    streamed = await post(house, COMPLETIONS, {**body, "stream": True})
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.text.split("\n")
              if line.startswith("data: {")]  # fmt: skip
    for choice in choices:
        parts = [one["logprobs"] for one in chunks if one["index"] == choice["index"]]
        joined = {
            key: [one for part in parts if part for one in part[key]] for key in choice["logprobs"]
        }
        assert joined == choice["logprobs"]


async def test_a_prompts_logprobs_alone() -> None:
    """``max_tokens`` 0: the prompt's text and logprobs, no token of an answer in text, logprobs or
    usage, in a stream neither."""
    house = build()
    body = completion(prompt="ab", echo=True, logprobs=1, max_tokens=0)
    answer = (await post(house, COMPLETIONS, body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 5)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"stream": True, "stream_options": options}
    streamed = await post(house, COMPLETIONS, body)
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n")
              if line.startswith("data: {")]  # fmt: skip
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 0, 0]
    assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]
    assert chunks[1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_streams_text_is_the_whole_answers_text(path: str) -> None:
    """The same request streamed and not gives the same text."""
    house = build()
    body = chat() if path == CHAT else completion()
    whole = (await post(house, path, body)).json()["choices"][0]
    streamed = await post(house, path, {**body, "stream": True})
    lines = [line[6:] for line in streamed.text.split("\n") if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in lines]
    if path == CHAT:
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_the_headers_of_a_stream() -> None:
    """Proxies must neither gather nor pack it; ids and time are told."""
    house = build()
    response = await post(house, CHAT, chat(stream=True), **{"x-request-id": "my label"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "my label"
    assert response.headers["x-mesh-request-id"] == house.client.requests[0].request_id
    assert int(response.headers["openai-processing-ms"]) >= 0


async def test_the_clients_id_is_a_label_only() -> None:
    """Two requests with one client id are two requests; the label travels along."""
    house = build()
    for _ in range(2):
        await post(house, CHAT, chat(), **{"x-request-id": "same"})
    first, second = house.client.requests
    assert first.request_id != second.request_id
    assert (first.label, second.label) == ("same", "same")


@pytest.mark.parametrize("label", ["x" * 129, "\x01", "é"])
async def test_a_label_that_fits_no_header_is_dropped(label: str) -> None:
    """What can't stand in a header and a log line is not taken over; the answer has our id."""
    house = build()
    async with browser(house) as client:
        headers = [(b"x-request-id", label.encode("latin-1"))]
        response = await client.post(CHAT, json=chat(), headers=headers)
    assert house.client.requests[0].label == ""
    assert response.headers["x-request-id"] == house.client.requests[0].request_id


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ContextTooLong("too long", param="messages"), 400, "invalid_request_error"),
        (InvalidRequest("no", param="logit_bias"), 400, "invalid_request_error"),
        (ModelNotFound("gone", param="model"), 404, "invalid_request_error"),
        (PayloadTooLarge("big"), 413, "invalid_request_error"),
        (QueueFull("full"), 429, "rate_limit_error"),
        (BusUnavailable("away"), 503, "server_error"),
        (DeadlineExceeded("late"), 504, "server_error"),
        (EngineFailed("broke"), 500, "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_admission_refuses_has_its_own_status(
    error: MeshError, status: int, kind: str, stream: bool
) -> None:
    """The status waits for admission, so a refusal is no 200, streamed or not."""
    house = build(refusing(error))
    response = await post(house, CHAT, chat(stream=stream))
    assert response.status_code == status
    assert response.json() == {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }
    assert ("retry-after" in response.headers) == error.retryable
    assert house.count(error.code) == 1
    assert house.client.streams[0].cancelled == []


@pytest.mark.parametrize(("said_s", "told"), [(None, "1"), (2.1, "3"), (0.2, "1"), (60.0, "60")])
async def test_a_refusal_says_when_to_come_again(said_s: float | None, told: str) -> None:
    """In whole seconds, what the refusal itself says; one second when it does not."""
    response = await post(build(refusing(QueueFull("full", retry_after_s=said_s))), CHAT, chat())
    assert (response.status_code, response.headers["retry-after"]) == (429, told)


async def test_a_bus_that_is_away_is_a_503_at_once() -> None:
    """Nothing is queued for a bus that is away."""
    script = Script(steps=[], end=None, submit_error=BusUnavailable("the broker is away"))
    response = await post(build(FakeClient(lambda _: script)), CHAT, chat())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "bus_unavailable")


async def test_a_silent_admission_is_a_503() -> None:
    """When admission does not decide in time, the request is cancelled and the client told."""
    silent = FakeClient(lambda _: Script(steps=[], end=None, silent=True))
    house = build(silent, Limits(accept_s=0.05))
    response = await post(house, CHAT, chat())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")
    assert len(silent.streams[0].cancelled) == 1


async def test_one_refused_prompt_refuses_the_batch() -> None:
    """A batch is answered whole or not at all: the accepted rest is cancelled."""

    def script(request: InferenceRequest) -> Script:
        if request.prompt == "bad":
            return Script(steps=[], end=None, refusal=ContextTooLong("too long"))
        return Script(steps=[asyncio.Event()], end=None)

    house = build(FakeClient(script))
    response = await post(house, COMPLETIONS, completion(prompt=["good", "bad"]))
    assert response.json()["error"]["code"] == "context_length_exceeded"
    good, bad = house.client.streams
    assert (len(good.cancelled), len(bad.cancelled)) == (1, 0)


async def test_a_failure_before_the_end_of_a_whole_answer_has_its_status() -> None:
    """No 200 with half a text."""
    response = await post(build(failing(EngineFailed("broke"))), CHAT, chat())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")


@pytest.mark.parametrize("error", [EngineFailed("broke"), DeadlineExceeded("late")])
async def test_a_failure_in_mid_stream_is_an_error_event_without_done(error: MeshError) -> None:
    """What was said stays; then the error; never [DONE]."""
    house = build(failing(error))
    response = await post(house, CHAT, chat(stream=True))
    blocks = response.text.split("\n\n")
    assert response.status_code == 200
    assert json.loads(blocks[-2].removeprefix("data: "))["error"]["code"] == error.code
    assert "[DONE]" not in response.text
    assert [json.loads(b[6:])["choices"][0]["finish_reason"] for b in blocks[:-2]] == [None] * 3
    assert house.count(error.code) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_that_tells_nothing(stream: bool) -> None:
    """An unexpected exception is logged with its traceback; the client sees no inner detail."""

    def script(request: InferenceRequest) -> Script:
        return Script(steps=[], end=None, submit_error=RuntimeError("secret detail"))

    house = build(FakeClient(script))
    response = await post(house, CHAT, chat(stream=stream))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert any("secret detail" in line.get("exception", "") for line in log_lines(house))


async def test_unknown_models_are_404_and_never_reach_the_bus() -> None:
    """Only registered names become subjects."""
    house = build()
    response = await post(house, CHAT, chat(model="a.*.>"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"
    assert house.client.streams == []


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", CHAT, 405, "POST"),
        ("DELETE", COMPLETIONS, 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("PUT", "/v1/models/x", 405, "GET, HEAD"),
        ("GET", "/", 404, None),
        ("POST", "/v1/chat/completions/", 404, None),
        ("GET", "/v1/é/../x", 404, None),
    ],
)
async def test_wrong_method_and_unknown_path(
    method: str, path: str, status: int, allow: str | None
) -> None:
    """405 says what is allowed; both have the same error shape as everything else."""
    async with browser(build()) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert response.headers.get("allow") == allow
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_models() -> None:
    """The list, one by name (slashes and all), and 404 for others."""
    async with browser(build()) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get(f"/v1/models/{MODEL}")).json()
        missing = await client.get("/v1/models/none")
    assert one == {
        "id": MODEL,
        "object": "model",
        "created": CARD.created_unix_s,
        "owned_by": "inference-mesh",
        "root": MODEL,
        "max_model_len": 2048,
    }
    assert listed == {"object": "list", "data": [one]}
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_health_ready_and_metrics() -> None:
    """Alive at once; ready when the process says so; metrics of this bridge."""
    house = build()
    async with browser(house) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        house.health.set("bridge", True)
        assert (await client.get("/ready")).status_code == 200
        await client.post(CHAT, json=chat(stream=True))
        text = (await client.get("/metrics")).text
    assert 'mesh_requests_ended_total{outcome="stop"} 1.0' in text
    assert "mesh_ttft_seconds_count 1.0" in text
    assert "mesh_itl_seconds_count 3.0" in text
    assert "mesh_e2e_seconds_count 1.0" in text
    assert "mesh_open_requests 0.0" in text


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\x00" * 50, b'{"model":' + b"[" * 99_999])
async def test_broken_json_is_a_400(data: bytes) -> None:
    """Whatever the bytes, the answer is an error in OpenAI's shape."""
    async with browser(build()) as client:
        response = await client.post(CHAT, content=data)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_wrong_content_type_is_tolerated(kind: str) -> None:
    """What counts is the body."""
    async with browser(build()) as client:
        body = json.dumps(chat()).encode()
        response = await client.post(CHAT, content=body, headers={"content-type": kind})
    assert response.status_code == 200


async def test_a_body_over_the_limit_is_a_413() -> None:
    """Said or not said beforehand: 5 MB are refused, just under the limit is not."""

    async def in_parts() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * 100_000

    house = build()
    async with browser(house) as client:
        declared = await client.post(CHAT, content=b" " * 5_000_000)
        chunked = await client.post(CHAT, content=in_parts())
        padded = json.dumps(chat()).encode().ljust(house.limits.max_body_bytes)
        fits = await client.post(CHAT, content=padded)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "payload_too_large"
    assert fits.status_code == 200


async def test_a_body_that_does_not_come_is_a_408() -> None:
    """A client that never finishes its body does not hold a place for ever."""

    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with browser(build(limits=Limits(body_s=0.05))) as client:
        response = await client.post(CHAT, content=stuck())
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")


async def test_the_deadline_comes_from_the_header_or_the_default() -> None:
    """Relative milliseconds in the bus's time; never beyond the mesh's maximum."""
    house = build(limits=Limits(default_deadline_s=300, max_deadline_s=780))
    for header in (None, "1500", "99999999"):
        await post(house, CHAT, chat(), **({"x-mesh-deadline-ms": header} if header else {}))
    left_ms = [(request.deadline_unix_ms or 0) - NOW_UNIX_MS for request in house.client.requests]
    assert left_ms == [300_000, 1500, 780_000]


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1.5", "9" * 30])
async def test_a_deadline_that_is_no_time_is_a_400(value: str) -> None:
    """The header is named."""
    response = await post(build(), CHAT, chat(), **{"x-mesh-deadline-ms": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-mesh-deadline-ms"


async def test_too_many_open_requests_are_a_429() -> None:
    """The bound on open requests refuses at once, with Retry-After; others go on."""
    gate = asyncio.Event()

    def script(request: InferenceRequest) -> Script:
        said = say(request)
        return Script(steps=[gate, *said.steps], end=said.end)

    house = build(FakeClient(script), Limits(max_open_requests=1))
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(post(house, CHAT, chat()))
        await house.client.submitted.wait()
        second = await post(house, CHAT, chat())
        gate.set()
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert first.result().status_code == 200


async def test_one_log_line_per_request_without_what_was_said() -> None:
    """The canonical line has ids, counts and times, never prompt or answer."""
    house = build()
    await post(house, CHAT, chat(stream=True), **{"x-request-id": "lbl"})
    (line,) = log_lines(house)
    assert line["event"] == "request_ended"
    assert (line["status"], line["outcome"], line["label"]) == (200, "stop", "lbl")
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (5, 4, 2)
    assert line["ttft_ms"] > 0
    assert not any(word.strip() in house.output.getvalue() for word in ("Hello", "wörld", "Hi"))
