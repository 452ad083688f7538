"""``/tokenize`` and ``/detokenize``: vLLM's shapes, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import BusUnavailable
from schemas.requests import ChatMessage
from schemas.tokenize import Question, Tokenize, Tokenized
from tests.pipeline.bridge.fake import CARD, MODEL, FakeClient, House, build, patient, spell
from tests.pipeline.bridge.test_convert import JSON


class Listening(FakeClient):
    """Keeps the questions."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Question] = []
        self.tokenizer = self._note

    def _note(self, question: Question) -> Tokenized:
        self.asked.append(question)
        return spell(question)  # type: ignore[return-value]


@pytest.fixture
def client() -> Listening:
    return Listening()


@pytest.fixture
def house(client: Listening) -> House:
    return build(client)


@pytest.fixture
async def http(house: House) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=house.bridge)
    async with httpx.AsyncClient(transport=transport, base_url="http://bridge") as made:
        yield made


async def test_text_and_back(http: httpx.AsyncClient, client: Listening) -> None:
    """The fields that vLLM's clients read, and one log line."""
    said = await http.post("/tokenize", json={"model": MODEL, "prompt": "Hi", "x": 1})
    assert said.status_code == 200
    assert said.json() == {
        "count": 2, "max_model_len": CARD.context_length, "tokens": [72, 105], "token_strs": None,
    }  # fmt: skip
    back = await http.post("/detokenize", json={"model": MODEL, "tokens": [72, 105]})
    assert back.json() == {"prompt": "Hi"}
    assert client.asked[0] == Tokenize(model=MODEL, prompt="Hi")


async def test_a_conversation(http: httpx.AsyncClient, client: Listening) -> None:
    """Messages as in chat; options go along."""
    body = {
        "model": MODEL,
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "Hi"}]}],
        "add_special_tokens": True,
        "add_generation_prompt": False,
        "return_token_strs": None,
    }
    assert (await http.post("/tokenize", json=body)).status_code == 200
    parts = [{"type": "text", "text": "Hi"}]
    assert client.asked == [
        Tokenize(
            model=MODEL,
            messages=(ChatMessage(role="system", content=parts),),  # type: ignore[arg-type]
            add_special_tokens=True,
            add_generation_prompt=False,
        )
    ]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"prompt": "x"}, 400, "model"),
        ("/tokenize", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": [1]}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "messages": [{"role": "x"}]}, 400, "messages[0].role"),
        (
            "/tokenize",
            {"model": MODEL, "prompt": "x", "return_token_strs": True},
            400,
            "return_token_strs",
        ),
        ("/tokenize", {"model": "none", "prompt": "x"}, 404, "model"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [2**32]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"model": "none", "tokens": []}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient,
    client: Listening,
    path: str,
    body: dict[str, object],
    status: int,
    param: str,
) -> None:
    """The caller's fault, and no question is asked."""
    refused = await http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert client.asked == []


async def test_other_methods_are_a_405(http: httpx.AsyncClient) -> None:
    """As for the other addresses."""
    assert (await http.get("/tokenize")).status_code == 405


async def test_nobody_who_answers_is_a_503(http: httpx.AsyncClient, client: Listening) -> None:
    """With the time after which to come again."""

    def away(question: Question) -> Tokenized:
        raise BusUnavailable("nobody listens")

    client.tokenizer = away
    refused = await http.post("/tokenize", json={"model": MODEL, "prompt": "x"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


@patient
@given(
    fields=st.dictionaries(
        st.sampled_from(["model", "prompt", "messages", "tokens", "add_special_tokens"]), JSON
    )
)
async def test_no_body_is_a_5xx(fields: dict[str, object]) -> None:
    """Whatever is sent: an answer, or the caller's fault."""
    transport = httpx.ASGITransport(app=build().bridge)
    async with httpx.AsyncClient(transport=transport, base_url="http://bridge") as http:
        for path in ("/tokenize", "/detokenize"):
            body = msgspec.json.encode({"model": MODEL, **fields})
            said = await http.post(path, content=body)
            assert said.status_code in (200, 400, 404)
