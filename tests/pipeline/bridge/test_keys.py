"""API keys over HTTP: OpenAI's client, real sockets, a scripted mesh behind the bridge."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from infra.api_key import hash_of
from infra.log import make_logger
from pipeline.access.budgets import Budgets, open_budgets
from pipeline.access.door import KeyDoor
from pipeline.access.key import ApiKey
from schemas.errors import ContextTooLong, EngineFailed, MeshError
from schemas.requests import InferenceRequest
from tests.pipeline.bridge.fake import (
    MODEL,
    WORDS,
    FakeClient,
    House,
    Script,
    build,
    chat,
    completion,
    say,
    served,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SECRET = "mesh-0123456789abcdef0123456789"
HI: list[dict[str, str]] = [{"role": "user", "content": "Hi"}]


def key(secret: str = SECRET, **more: Any) -> ApiKey:
    given = {"name": "acme-1", "tenant": "acme", **more}
    return ApiKey(digest=hash_of(secret.encode()), **given)


@pytest.fixture
def budgets(tmp_path: Path) -> Iterator[Budgets]:
    """A clock that stands still: nothing drains while a busy machine tests."""
    with open_budgets(tmp_path, patience_s=60, now_s=lambda: 5000.0) as opened:
        yield opened


def house_with(budgets: Budgets, *keys: ApiKey, client: FakeClient | None = None) -> House:
    log = make_logger("door", stream=io.StringIO())
    return build(client, door=KeyDoor(None, keys, budgets, log))


@asynccontextmanager
async def openai_of(house: House, secret: str = SECRET) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(house) as port:
        base = f"http://127.0.0.1:{port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key=secret, max_retries=0) as client:
            yield client


async def post(house: House, path: str, body: object, secret: str = SECRET) -> httpx.Response:
    return await request(house, "POST", path, secret, json=body)


async def request(
    house: House, method: str, path: str, secret: str = SECRET, **more: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(house.bridge)
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as client:
        return await client.request(method, path, headers=headers, **more)


def rates(response: httpx.Response, what: str) -> tuple[str, str, str]:
    """Limit, remaining, reset."""
    return tuple(  # type: ignore[return-value]
        response.headers[f"x-ratelimit-{part}-{what}"] for part in ("limit", "remaining", "reset")
    )


def waiting(client: FakeClient, gate: asyncio.Event) -> None:
    """Let ``client`` answer, after its first token, only when the gate opens."""

    def script(request: InferenceRequest) -> Script:
        said = say(request)
        return Script(steps=[said.steps[0], gate, *said.steps[1:]], end=said.end)

    client.script = script


# --- who enters --------------------------------------------------------------------------------


async def test_openais_client_with_and_without_the_right_key(budgets: Budgets) -> None:
    """AuthenticationError for a wrong one, streamed or not; an answer for a right one."""
    house = house_with(budgets, key())
    async with openai_of(house, "mesh-wrong-wrong-wrong-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HI)
        assert (refused.value.code, refused.value.type) == (
            "invalid_api_key",
            "invalid_request_error",
        )
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai_of(house) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == "".join(WORDS)
    assert len(house.client.requests) == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/v1/requests/abc/events"),
        ("GET", "/no/such/path"),
        ("DELETE", CHAT),
    ],
)
async def test_every_path_asks_for_a_key(budgets: Budgets, method: str, path: str) -> None:
    """401 with the challenge before anything else is said, or read of the body."""
    house = house_with(budgets, key())
    for secret in ("", "mesh-wrong"):
        response = await request(house, method, path, secret, content=b"{")
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert house.client.requests == []
    assert house.count("invalid_api_key") == 2


async def test_probes_need_no_key_and_metrics_are_elsewhere(budgets: Budgets) -> None:
    """/health and /ready tell nothing of users; /metrics is at the health port alone."""
    house = house_with(budgets, key())
    assert (await request(house, "GET", "/health", "")).status_code == 200
    assert (await request(house, "GET", "/ready", "")).status_code == 503
    assert (await request(house, "GET", "/metrics", "")).status_code == 401
    refused = await request(house, "GET", "/metrics")
    assert refused.status_code == 404
    assert "health port" in refused.json()["error"]["message"]


async def test_the_log_names_the_key_and_never_shows_it(budgets: Budgets) -> None:
    """Name and tenant in the one line; the key and its hash nowhere."""
    house = house_with(budgets, key())
    await post(house, CHAT, chat())
    await post(house, CHAT, chat(), SECRET + "-mistyped")
    right, wrong = [json.loads(line) for line in house.output.getvalue().splitlines()]
    assert (right["key"], right["tenant"], right["status"]) == ("acme-1", "acme", 200)
    assert (wrong["status"], wrong.get("key")) == (401, None)
    assert SECRET not in house.output.getvalue()
    assert hash_of(SECRET.encode()).hex()[:8] not in house.output.getvalue()


# --- whose request it is ------------------------------------------------------------------------


async def test_tenant_and_priority_are_the_keys(budgets: Budgets) -> None:
    """Whatever the body says: the tenant travels, so that caches are apart; the ceiling holds."""
    house = house_with(budgets, key(priority=-1, max_priority=2))
    for priority in (None, 1, 99):
        await post(house, CHAT, chat(priority=priority, user="other", tenant="other"))
    assert [one.tenant for one in house.client.requests] == ["acme"] * 3
    assert [one.priority for one in house.client.requests] == [-1, 1, 2]


async def test_without_keys_everything_is_as_before() -> None:
    """No tenant, the body's priority, no headers."""
    house = build()
    response = await post(house, CHAT, chat(priority=7), "")
    (sent,) = house.client.requests
    assert (sent.tenant, sent.priority) == ("", 7)
    assert not any(name.startswith("x-ratelimit") for name in response.headers)


async def test_a_stream_is_resumed_by_its_tenant_alone(budgets: Budgets) -> None:
    """Any key of the tenant that may use the model; to others there is no such request."""
    house = house_with(
        budgets,
        key(),
        key("second", name="acme-2"),
        key("narrow", name="acme-3", models=("other",)),
        key("bob", name="bob", tenant="bob"),
    )
    await post(house, CHAT, chat(stream=True))
    path = f"/v1/requests/{house.client.requests[0].request_id}/events"
    assert (await request(house, "GET", path, "second")).text.endswith("data: [DONE]\n\n")
    for secret in ("bob", "narrow"):
        other = await request(house, "GET", path, secret)
        assert (other.status_code, other.json()["error"]["code"]) == (404, "request_not_found")


async def test_a_key_sees_its_models_only(budgets: Budgets) -> None:
    """NotFoundError in the same words whether the model exists or not, on every path."""
    house = house_with(
        budgets,
        key(models=("other*",)),
        key("all", name="all"),
        key("org", models=("org/*",), name="o"),
    )
    async with openai_of(house) as client:
        assert [model async for model in client.models.list()] == []
        said = set()
        for name in (MODEL, "none"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.chat.completions.create(model=name, messages=HI)
            assert refused.value.code == "model_not_found"
            said.add(refused.value.message.replace(name, "M"))
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve(name)
        assert len(said) == 1
    assert (await post(house, "/tokenize", {"model": MODEL, "prompt": "x"})).status_code == 404
    for secret in ("all", "org"):
        listed = (await request(house, "GET", "/v1/models", secret)).json()["data"]
        assert [one["id"] for one in listed] == [MODEL]
        assert (await post(house, CHAT, chat(), secret)).status_code == 200


# --- limits -------------------------------------------------------------------------------------


async def test_requests_per_minute_through_openais_client(budgets: Budgets) -> None:
    """RateLimitError with the time to wait, after as many answers as are allowed."""
    house = house_with(budgets, key(requests_per_minute=2))
    async with openai_of(house) as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI)
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        assert raw.headers["x-ratelimit-reset-requests"] == "30s"
        assert "x-ratelimit-limit-tokens" not in raw.headers
        await client.completions.create(model=MODEL, prompt="x")
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    assert (refused.value.code, refused.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    headers = refused.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("30", "30000")
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert len(house.client.requests) == 2


async def test_tokens_are_charged_by_usage_in_the_end(budgets: Budgets) -> None:
    """5 prompt tokens and 4 of the answer, streamed or not, not the 500 that were reserved."""
    house = house_with(budgets, key(tokens_per_minute=1000))
    whole = await post(house, CHAT, chat(max_tokens=500))
    assert rates(whole, "tokens") == ("1000", "991", "540ms")
    streamed = await post(house, CHAT, chat(max_tokens=500, stream=True))
    # Said before the first token: what the fake admission allows, 16, is reserved.
    assert rates(streamed, "tokens")[1] == str(991 - 5 - 16)
    after = await post(house, COMPLETIONS, completion(prompt=["a", "b"], max_tokens=1))
    assert rates(after, "tokens")[1] == str(991 - 9 - 18)


async def test_what_can_never_fit_is_said_so(budgets: Budgets) -> None:
    """429 that no client should repeat; nothing reaches the mesh, nothing is charged."""
    house = house_with(budgets, key(tokens_per_minute=100, requests_per_minute=5))
    response = await post(house, CHAT, chat(max_tokens=100))
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers
    assert (rates(response, "tokens")[1], rates(response, "requests")[1]) == ("100", "5")
    assert house.client.requests == []


async def test_a_prompt_that_admission_finds_too_long_is_refused(budgets: Budgets) -> None:
    """Before the answer begins: the request is cancelled on its chain, its tokens are free."""
    house = house_with(budgets, key(tokens_per_minute=20))
    response = await post(house, CHAT, chat(max_tokens=16, stream=True))  # 5 + 16
    assert response.status_code == 429
    await house.all_closed()
    (stream,) = house.client.streams
    assert stream.cancelled
    assert rates(response, "tokens")[1] == "20"


@pytest.mark.parametrize(
    ("error", "used"), [(ContextTooLong("long"), 0), (EngineFailed("broke"), 0)]
)
async def test_what_is_refused_costs_no_tokens(
    budgets: Budgets, error: MeshError, used: int
) -> None:
    """The caller's fault or ours."""
    refusing = FakeClient(lambda _: Script(steps=[], end=None, refusal=error))
    house = house_with(budgets, key(tokens_per_minute=1000), client=refusing)
    await post(house, CHAT, chat(max_tokens=100))
    with budgets.account(key().digest) as account:
        assert account.tokens.level == used


async def test_an_answer_that_breaks_off_costs_what_was_heard(budgets: Budgets) -> None:
    """Its prompt and two tokens."""

    def script(request: InferenceRequest) -> Script:
        return Script(steps=[*say(request).steps[:2], EngineFailed("broke")], end=None)

    house = house_with(budgets, key(tokens_per_minute=1000), client=FakeClient(script))
    response = await post(house, CHAT, chat(max_tokens=100, stream=True))
    assert "engine_failed" in response.text
    with budgets.account(key().digest) as account:
        assert account.tokens.level == 5 + 2


async def test_a_client_that_leaves_pays_what_was_made_and_frees_its_place(
    budgets: Budgets,
) -> None:
    """Its prompt, the token it got, and no place; the same for one who waits for another place."""
    gate = asyncio.Event()
    house = house_with(budgets, key(tokens_per_minute=1000, concurrent_requests=1))
    waiting(house.client, gate)
    async with openai_of(house) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, max_tokens=100
        )
        await anext(aiter(stream))
        with pytest.raises(openai.RateLimitError, match="1 requests open"):
            await client.chat.completions.create(model=MODEL, messages=HI, max_tokens=10)
        await stream.close()
        async with asyncio.timeout(30):
            await house.client.streams[0].is_closed.wait()
            while _num_open(budgets):
                await asyncio.sleep(0.01)
        with budgets.account(key().digest) as account:
            assert account.tokens.level == 5 + 1
        gate.set()
        assert (await client.chat.completions.create(model=MODEL, messages=HI)).choices


async def test_a_request_that_runs_on_without_its_client_keeps_its_charge(
    budgets: Budgets,
) -> None:
    """What was reserved stays charged: nobody here learns what it uses."""
    house = house_with(budgets, key(tokens_per_minute=1000))
    waiting(house.client, asyncio.Event())
    async with openai_of(house) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            stream=True,
            max_tokens=100,
            extra_headers={"x-mesh-resume-window": "20"},
        )
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(30):
            await house.output.ended.wait()
    assert house.client.streams[0].was_left
    with budgets.account(key().digest) as account:
        assert account.tokens.level == 5 + 16
        assert account.num_open(1) == 0


async def test_a_bug_keeps_no_place(budgets: Budgets) -> None:
    """What was reserved stays charged: nobody knows what was used."""

    def script(request: InferenceRequest) -> Script:
        return Script(steps=[], end=None, submit_error=RuntimeError("a bug"))

    house = house_with(
        budgets,
        key(concurrent_requests=1, tokens_per_minute=1000),
        client=FakeClient(script),
    )
    for _ in range(2):
        assert (await post(house, CHAT, chat(max_tokens=100))).status_code == 500
    with budgets.account(key().digest) as account:
        assert account.num_open(1) == 0
        assert account.tokens.level == 2 * 101


async def test_tokenizing_counts_as_a_request(budgets: Budgets) -> None:
    """Both ways; listing models does not."""
    house = house_with(budgets, key(requests_per_minute=2))
    for _ in range(3):
        listed = await request(house, "GET", "/v1/models")
        assert listed.status_code == 200
        assert "x-ratelimit-remaining-requests" not in listed.headers
    body = {"model": MODEL, "prompt": "x"}
    assert rates(await post(house, "/tokenize", body), "requests")[1] == "1"
    answer = await post(house, "/detokenize", {"model": MODEL, "tokens": [65]})
    assert rates(answer, "requests")[1] == "0"
    assert (await post(house, "/tokenize", body)).status_code == 429


async def test_limits_of_one_key_are_nothing_to_another(budgets: Budgets) -> None:
    """Also of the same tenant."""
    house = house_with(
        budgets, key(requests_per_minute=1), key("two", name="acme-2", requests_per_minute=1)
    )
    assert (await post(house, CHAT, chat())).status_code == 200
    assert (await post(house, CHAT, chat())).status_code == 429
    assert (await post(house, CHAT, chat(), "two")).status_code == 200


async def test_a_client_that_waits_as_told_gets_its_answer(tmp_path: Path) -> None:
    """With a clock that runs: OpenAI's client retries by itself and succeeds."""
    with open_budgets(tmp_path, patience_s=60) as running:
        house = house_with(running, key(requests_per_minute=600))
        with running.account(key().digest) as account:
            account.requests.drain(600, running.now_s())
            account.requests.charge(600)
        async with served(house) as port:
            base = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key=SECRET, max_retries=5) as client:
                answer = await client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "".join(WORDS)


def _num_open(budgets: Budgets) -> int:
    with budgets.account(key().digest) as account:
        return account.num_open(1)
