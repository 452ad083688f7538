import asyncio

import pytest
from starlette.responses import PlainTextResponse

from loadgen.driver import closed_loop
from loadgen.measure import RequestResult, summarize
from loadgen.recorder import Recorder
from loadgen.settings import Endpoint
from loadgen.targets import HttpTarget
from loadgen.workload import Workload
from tests.loadgen.fakes import limits
from tests.loadgen.sse_server import (
    DONE,
    SseServer,
    event,
    refusal,
    sse_server,
    text_event,
    usage_event,
)


def workload(endpoint: Endpoint = "completions") -> Workload:
    is_chat = endpoint == "chat"
    kind = "words" if is_chat else "ids"
    return Workload(model="m", input_len=6, output_len=4, kind=kind, is_chat=is_chat)


async def load(server: SseServer, num_requests: int = 1, **changes: float) -> Recorder:
    recorder, target = Recorder(), HttpTarget(server.url, "completions")
    bounds = limits(num_requests=num_requests, **changes)
    await closed_loop(target, workload().requests(), 1, bounds, recorder)
    target.close()
    return recorder


async def one(script: list[bytes]) -> RequestResult:
    async with sse_server(SseServer(script=script)) as server:
        return (await load(server)).results[0]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_stream_is_measured_event_by_event(endpoint: Endpoint) -> None:
    """One event per token, counts from usage; role and closing events of chat are no tokens."""
    async with sse_server(SseServer()) as server:
        recorder, target = Recorder(), HttpTarget(server.url, endpoint, api_key="secret")
        await closed_loop(
            target, workload(endpoint).requests(), 2, limits(num_requests=6), recorder
        )
        target.close()
    summary = summarize(recorder.results, wall_s=recorder.wall_s)
    assert summary.errors == {}
    assert summary.num_completed == 6
    assert summary.num_output_tokens == 24
    assert summary.num_cached_tokens == 12
    assert summary.itl_ms.num == 18
    assert summary.num_short == summary.num_without_usage == 0
    body, headers = server.bodies[0], server.headers[0]
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (body["min_tokens"], body["ignore_eos"]) == (4, True)
    assert headers["authorization"] == "Bearer secret"
    assert len({sent["x-request-id"] for sent in server.headers}) == 6
    if endpoint == "completions":
        assert len(body["prompt"]) == 6


async def test_connections_are_used_again() -> None:
    """Requests one after another share one connection: no handshake is in their TTFT."""
    async with sse_server(SseServer()) as server:
        await load(server, 10)
    assert len(server.peers) == 1


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_target_may_be_given_with_v1(suffix: str) -> None:
    """Server root and the base url of OpenAI clients mean the same."""
    async with sse_server(SseServer()) as server:
        target, result = (
            HttpTarget(server.url + suffix, "completions"),
            RequestResult(number=0, output_len=4),
        )
        await target.run(workload().request(0), result)
        target.close()
    assert result.state == "completed"


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ([text_event("a"), text_event("b", "length"), usage_event(1, 2)], "stream_broken", "DONE"),
        ([text_event("a"), text_event("b"), usage_event(1, 1), DONE], "usage_mismatch", "2 tokens"),
        ([usage_event(1, 0), DONE], "no_tokens", "without a token"),
        ([text_event("a"), event({"error": {"message": "m", "code": "oops"}})], "oops", "m"),
        ([event({"error": "plain words"})], "stream_error", "plain words"),
        ([b"data: {broken\n\n"], "bad_stream", "no completion chunk"),
        ([b"x" * (1 << 20), b"x" * 10], "bad_stream", "megabyte"),
    ],
)  # fmt: skip
async def test_a_bad_stream_fails_by_kind(script: list[bytes], kind: str, message: str) -> None:
    """Whatever a stream does wrong has its own kind, and a message that says what."""
    result = await one(script)
    assert (result.state, result.error_kind) == ("failed", kind)
    assert message in result.error_message


async def test_events_cut_anywhere_are_read_the_same() -> None:
    """A line may arrive in any pieces, with CRLF, comments and ids between."""
    whole = b": keep-alive\r\n\r\nid: 1\r\n" + text_event("a").replace(b"\n", b"\r\n")
    whole += text_event("b", "length") + usage_event(1, 2) + DONE
    result = await one([whole[i : i + 7] for i in range(0, len(whole), 7)])
    assert (result.state, len(result.event_s), result.num_tokens) == ("completed", 2, 2)


async def test_an_answer_without_any_text_is_seen_by_its_end() -> None:
    """Special tokens have no text: the event with the finish reason is the only sign of them."""
    result = await one([text_event("", "length"), usage_event(1, 3), DONE])
    assert (result.state, len(result.event_s), result.num_tokens) == ("completed", 1, 3)
    assert result.end_s == result.event_s[0]


async def test_refusals_are_errors_by_status() -> None:
    """An HTTP error gives its status as kind and the server's own words."""
    async with sse_server(SseServer(refusal=refusal(429, "too many"))) as server:
        (result,) = (await load(server)).results
    assert (result.error_kind, result.error_message) == ("http_429", "too many")
    async with sse_server(SseServer(refusal=PlainTextResponse("oh no", 500))) as server:
        (result,) = (await load(server)).results
    assert (result.error_kind, result.error_message) == ("http_500", "oh no")


async def test_nobody_listening_is_a_connection_error() -> None:
    """A refused connection is an error of the request, not of the run."""
    async with sse_server(SseServer()) as server:
        pass
    (result,) = (await load(server)).results
    assert result.error_kind == "connection"


async def test_a_request_given_up_is_closed_towards_the_server() -> None:
    """On a time-out the server sees its client leave, and the first token's time is kept."""
    async with asyncio.timeout(60), sse_server(SseServer(is_stuck=True)) as server:
        (result,) = (await load(server, timeout_s=0.5)).results
        await server.left.wait()
    assert (result.error_kind, len(result.event_s)) == ("timeout", 1)
