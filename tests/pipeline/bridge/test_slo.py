"""Times by header, and what an answer says of a request that was degraded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from infra.api_key import hash_of
from infra.log import make_logger
from pipeline.access.budgets import open_budgets
from pipeline.access.door import KeyDoor
from pipeline.access.key import ApiKey
from pipeline.bridge.cors import EXPOSED
from pipeline.bridge.slo import degraded_headers
from schemas.errors import InvalidRequest, OverBudget, SloUnreachable
from schemas.requests import InferenceRequest, Slo
from schemas.tokens import Accepted
from tests.pipeline.bridge.fake import MODEL, FakeClient, FakeStream, build, chat, say
from tests.pipeline.bridge.test_http import CHAT, browser, log_lines, post, refusing


class Degraded(FakeClient):
    """Admission cuts every request, or lets another model answer."""

    def __init__(self, **word: Any) -> None:
        super().__init__(say)
        self.word = word

    async def submit(self, request: InferenceRequest) -> FakeStream:
        stream = await super().submit(request)
        accept, word = stream.accepted, self.word

        async def accepted() -> Accepted:
            return msgspec.structs.replace(await accept(), **word)

        stream.accepted = accepted  # type: ignore[method-assign]
        return stream


async def test_headers_become_the_requests_times() -> None:
    """Times and class travel with the request; without headers none are asked for."""
    house = build()
    headers = {"x-slo-ttft-ms": "500", "x-slo-tbt-ms": "12.5", "x-slo-class": "chat"}
    await post(house, CHAT, chat(), **headers)
    await post(house, CHAT, chat())
    first, second = house.client.requests
    assert first.slo == Slo(ttft_ms=500, tbt_ms=12.5, name="chat")
    assert second.slo == Slo()


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-slo-ttft-ms", "soon"),
        ("x-slo-ttft-ms", "0"),
        ("x-slo-ttft-ms", "-5"),
        ("x-slo-tbt-ms", "nan"),
        ("x-slo-tbt-ms", "1e9"),
        ("x-slo-tbt-ms", "99999999"),
        ("x-slo-class", "no such class!"),
    ],
)
async def test_a_header_that_cant_be_read_is_named(header: str, value: str) -> None:
    """400, and nothing reaches the mesh."""
    house = build()
    response = await post(house, CHAT, chat(), **{header: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, header)
    assert not house.client.requests


async def test_what_admission_says_of_times_names_the_header() -> None:
    """An unknown class is known to admission alone; an HTTP client sent a header, no field."""
    error = InvalidRequest("no SLO class 'gold'", param="slo.name")
    response = await post(build(refusing(error)), CHAT, chat(), **{"x-slo-class": "gold"})
    assert response.json()["error"]["param"] == "x-slo-class"
    unreachable = SloUnreachable("too short", param="slo.ttft_ms")
    response = await post(build(refusing(unreachable)), CHAT, chat(), **{"x-slo-ttft-ms": "1"})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "too short", "type": "invalid_request_error", "param": "x-slo-ttft-ms",
        "code": "slo_unreachable",
    }  # fmt: skip


async def test_a_key_with_times(tmp_path: Path) -> None:
    """The key's times stand where the request names none, and only there."""
    promised = Slo(ttft_ms=300.0, name="gold")
    key = ApiKey(name="k", digest=hash_of(b"secret"), tenant="t", slo=promised)
    with open_budgets(tmp_path) as budgets:
        house = build(door=KeyDoor(None, (key,), budgets, make_logger("test")))
        authorized = {"authorization": "Bearer secret"}
        await post(house, CHAT, chat(), **authorized)
        await post(house, CHAT, chat(), **authorized, **{"x-slo-tbt-ms": "20"})
    first, second = house.client.requests
    assert first.slo == promised
    assert second.slo == Slo(tbt_ms=20)


async def test_over_budget_says_when_to_come_again() -> None:
    """429 with a code of its own; in whole seconds for all, in milliseconds for who reads them."""
    response = await post(build(refusing(OverBudget("full", retry_after_s=1.25))), CHAT, chat())
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "over_budget"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "2"
    assert response.headers["retry-after-ms"] == "1250"


@pytest.mark.parametrize("stream", [False, True])
async def test_another_model_that_answers_is_named(stream: bool) -> None:
    """In ``model``, whole or streamed, and the one that was asked for in a header; pages may read
    it. The official client shows both."""
    house = build(Degraded(model="small", asked_model=MODEL))
    async with browser(house) as http:
        client = openai.AsyncOpenAI(api_key="-", base_url="http://mesh/v1", http_client=http)
        create: Any = client.chat.completions.with_raw_response.create
        raw = await create(**chat(), stream=stream)
        answer = raw.parse()
        models = [chunk.model async for chunk in answer] if stream else [answer.model]
    assert set(models) == {"small"}
    assert raw.headers["x-mesh-asked-model"] == MODEL
    assert "x-mesh-clamped-max-tokens" not in raw.headers
    ended = log_lines(house)[-1]
    assert (ended["model"], ended["answered_by"]) == (MODEL, "small")
    assert {"x-mesh-asked-model", "x-mesh-clamped-max-tokens"} <= set(EXPOSED)


async def test_a_clamp_is_told() -> None:
    """How many tokens it may be now; of several prompts the least."""
    house = build(Degraded(max_tokens=7, asked_max_tokens=100))
    response = await post(house, CHAT, chat(max_tokens=100))
    assert response.headers["x-mesh-clamped-max-tokens"] == "7"
    assert log_lines(house)[-1]["clamped_max_tokens"] == 7
    words = [
        Accepted(
            request_id="r", model="small", revision="r1", prompt_tokens=1, max_tokens=max_tokens,
            admitted_unix_ms=0, deadline_unix_ms=0, asked_model=asked, asked_max_tokens=cut,
        )
        for max_tokens, asked, cut in ((9, "", 10), (7, "groß", 10), (1, "", 0))
    ]  # fmt: skip
    assert degraded_headers(words) == [
        (b"x-mesh-asked-model", b"gro?"),
        (b"x-mesh-clamped-max-tokens", b"7"),
    ]
    assert degraded_headers(words[2:]) == []


async def test_a_plain_answer_says_nothing_of_it() -> None:
    """Nothing was degraded: no header."""
    response = await post(build(), CHAT, chat())
    assert not {"x-mesh-asked-model", "x-mesh-clamped-max-tokens"} & set(response.headers)
