"""No body, however strange, is answered with a 5xx or stops the bridge."""

from __future__ import annotations

import asyncio
import json

import httpx
from hypothesis import given
from hypothesis import strategies as st

from schemas.openai import ChatBody, CompletionBody
from tests.pipeline.bridge.fake import MODEL, House, build, chat, patient

PATHS = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 40)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
    | st.sampled_from(["", "text", "user", "assistant", MODEL, "none", "auto"])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "include_usage", "1", "-1", "x"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for kind in PATHS.values() for name in kind.__struct_fields__} - {"n"})
GOOD = {"model": MODEL, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6).map(lambda b: {**GOOD, **b})
RAW = st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode())


async def answers(house: House, path: str, data: bytes) -> httpx.Response:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(house.bridge), base_url="http://mesh"
    ) as client:
        return await client.post(path, content=data)


def check(path: str, data: bytes) -> None:
    async def ask() -> None:
        house = build()
        response = await answers(house, path, data)
        assert response.status_code in (200, 400, 404, 413), response.text
        if response.status_code != 200:
            assert response.json()["error"]["type"] == "invalid_request_error"
        good = await answers(house, "/v1/chat/completions", json.dumps(chat()).encode())
        assert good.status_code == 200
        assert house.bridge.num_open == 0

    asyncio.run(ask())


@patient
@given(path=st.sampled_from(sorted(PATHS)), body=BODIES)
def test_any_fields(path: str, body: dict[str, object]) -> None:
    """Any JSON value in any known field: an answer or a refusal, and the bridge lives on."""
    check(path, json.dumps(body).encode())


@patient
@given(path=st.sampled_from(sorted(PATHS)), data=RAW)
def test_any_bytes(path: str, data: bytes) -> None:
    """Any bytes as a body: the same."""
    check(path, data)
