"""Questions to tokenizers on a real broker: asked as a bridge does, answered by control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from infra.bus import Bus, BusForbidden, Msg, NobodyListens
from infra.log import make_logger
from infra.task_scope import task_scope
from pipeline import tokenize_service
from pipeline.registry import Registry
from pipeline.tokenize_service import MAX_TEXT_CHARS, TokenizerClient, TokenizeService
from pipeline.tokenizing import ChatTokenizer
from schemas import subjects
from schemas.codec import encode, pack_ids, unpack_ids
from schemas.errors import (
    BusUnavailable,
    InvalidRequest,
    MeshError,
    ModelNotFound,
    PayloadTooLarge,
    QueueFull,
)
from schemas.models import ModelCard
from schemas.requests import ChatMessage
from schemas.tokenize import Detokenize, Detokenized, Question, Tokenize, Tokenized
from tests.conftest import Connect, Until
from tests.pipeline.bridge.fake import MODEL, FakeClient, build
from tests.pipeline.door_rig import card_of
from tests.pipeline.rig import LogLines
from tests.tiny_tokenizer import tiny_tokenizer, write_tiny_tokenizer

TEXT = "Ĝis revido! 漢字 😀 <|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return ChatTokenizer(folder)


@asynccontextmanager
async def answering(bus: Bus, tokenizer: ChatTokenizer, lines: LogLines) -> AsyncIterator[None]:
    """One control process's part in this; it listens when the block begins."""
    registry = Registry(bus)
    await registry.start()
    card = card_of(tokenizer.folder)
    await registry.register(card)
    await registry.register(msgspec.structs.replace(card, name=MODEL))

    async def tokenizer_of(card: ModelCard) -> ChatTokenizer:
        return tokenizer

    service = TokenizeService(bus, registry, tokenizer_of, make_logger("t", stream=lines.stream))
    async with task_scope() as tasks:
        tasks.create_task(service.run())
        asker = TokenizerClient(bus, 0.5)
        async with asyncio.timeout(60):
            while True:
                try:
                    await asker.ask(Tokenize(model="tiny", prompt="x"))
                    break
                except NobodyListens:
                    await asyncio.sleep(0.005)
        yield


@pytest_asyncio.fixture
async def client(
    bus: Bus, connect: Connect, tokenizer: ChatTokenizer, lines: LogLines
) -> AsyncIterator[TokenizerClient]:
    """A bridge's way to ask, and control at work."""
    async with answering(bus, tokenizer, lines):
        yield TokenizerClient(await connect("bridge"), 5.0)


async def ids_of(client: TokenizerClient, **question: object) -> list[int]:
    said = await client.ask(Tokenize(model="tiny", **question))  # type: ignore[arg-type]
    assert isinstance(said, Tokenized)
    return unpack_ids(said.ids)


async def test_text_becomes_ids_and_text_again(client: TokenizerClient) -> None:
    """The ids are the tokenizer's, the context is the card's; back comes the very text, special
    tokens included."""
    said = await client.ask(Tokenize(model="tiny", prompt=TEXT))
    assert isinstance(said, Tokenized)
    assert unpack_ids(said.ids) == tiny_tokenizer().encode(TEXT).ids
    assert said.max_model_len == card_of(Path()).context_length
    back = await client.ask(Detokenize(model="tiny", ids=said.ids))
    assert back == Detokenized(text=TEXT)
    assert await ids_of(client, prompt="") == []


async def test_a_conversation_is_what_a_request_would_be(
    client: TokenizerClient, tokenizer: ChatTokenizer
) -> None:
    """Through the template, with the beginning of the answer or without."""
    messages = (ChatMessage(role="user", content="Hi"),)
    rendered = tokenizer.render_chat(messages)
    assert rendered.endswith("assistant\n")
    expected = unpack_ids(tokenizer.encode(rendered, add_special=False))
    assert await ids_of(client, messages=messages) == expected
    without = await ids_of(client, messages=messages, add_generation_prompt=False)
    assert tokenizer.decode(without, skip_special=False) == rendered.removesuffix(
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("question", "kind", "param"),
    [
        (Tokenize(model="none", prompt="x"), ModelNotFound, "model"),
        (Tokenize(model="tiny"), InvalidRequest, "prompt"),
        (Tokenize(model="tiny", messages=()), InvalidRequest, "messages"),
        (
            Tokenize(model="tiny", messages=(ChatMessage(role="wizard", content="x"),)),
            InvalidRequest,
            "messages[0].role",
        ),
        (Detokenize(model="tiny", ids=pack_ids([512])), InvalidRequest, "tokens"),
        (Detokenize(model="tiny", ids=b"123"), InvalidRequest, "ids"),
    ],
)
async def test_refusals_come_back_as_errors(
    client: TokenizerClient, question: Question, kind: type[MeshError], param: str
) -> None:
    """The same class, field and words as inside control."""
    with pytest.raises(kind) as caught:
        await client.ask(question)
    assert caught.value.param == param


async def test_what_is_too_large_is_said(
    client: TokenizerClient, bus: Bus, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text over the limit is refused, and so are questions and answers that the bus can't carry:
    the one here, the other by control."""
    with pytest.raises(InvalidRequest, match="characters") as caught:
        await client.ask(Tokenize(model="tiny", prompt="x" * (MAX_TEXT_CHARS + 1)))
    assert caught.value.param == "prompt"
    with pytest.raises(PayloadTooLarge):
        await client.ask(Tokenize(model="tiny", prompt="x" * bus.max_payload))
    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special: bytes(bus.max_payload))
    with pytest.raises(PayloadTooLarge):
        await client.ask(Tokenize(model="tiny", prompt="x"))


async def test_nobody_there_is_unavailable(connect: Connect, bus: Bus) -> None:
    """At once where nothing listens; after the time-out where nothing answers."""
    client = TokenizerClient(await connect("bridge"), 0.05)
    with pytest.raises(BusUnavailable):
        await client.ask(Tokenize(model="tiny", prompt="x"))
    await bus.subscribe(subjects.ALL_TOKENIZE, lambda message: None)
    with pytest.raises(BusUnavailable, match="no answer"):
        await client.ask(Tokenize(model="tiny", prompt="x"))


async def test_several_control_processes_share_the_questions(
    bus: Bus, connect: Connect, tokenizer: ChatTokenizer, lines: LogLines
) -> None:
    """Each question has one answer, and both answer some."""
    answered: dict[str, int] = {}

    class Counting(ChatTokenizer):
        def __init__(self, name: str) -> None:
            super().__init__(tokenizer.folder)
            self.name = name

        def encode(self, text: str, *, add_special: bool = True) -> bytes:
            answered[self.name] = answered.get(self.name, 0) + 1
            return super().encode(text, add_special=add_special)

    async with AsyncExitStack() as stack:
        for name in ("a", "b"):
            other = await connect("control")
            await stack.enter_async_context(answering(other, Counting(name), lines))
        answered.clear()
        client = TokenizerClient(await connect("bridge"), 5.0)
        for _ in range(40):
            assert await ids_of(client, prompt="x") == unpack_ids(tokenizer.encode("x"))
    assert sum(answered.values()) == 40
    assert len(answered) == 2


async def test_too_many_at_once_are_refused(
    client: TokenizerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded: what is over the limit is told so, and what was taken is answered."""
    monkeypatch.setattr(tokenize_service, "MAX_OPEN", 3)
    questions = [client.ask(Tokenize(model="tiny", prompt="a " * 50_000)) for _ in range(12)]
    answers = await asyncio.gather(*questions, return_exceptions=True)
    kinds = {type(answer) for answer in answers}
    assert kinds == {Tokenized, QueueFull}


async def test_odd_messages_do_not_end_the_service(
    client: TokenizerClient, bus: Bus, lines: LogLines
) -> None:
    """Bytes that are no question, one on another model's subject, one without a reply, a tokenizer
    that breaks: refused or passed over, and the next is answered."""
    for data in (b"", b"\xc1", b"{}"):
        message = await bus.request(subjects.tokenize("tiny"), data, timeout_s=5)
        assert b"question-refused/1" in message.data
    wrong = await bus.request(
        subjects.tokenize("other"), encode(Tokenize(model="tiny", prompt="x")), timeout_s=5
    )
    assert b"another subject" in wrong.data
    await bus.publish(subjects.tokenize("tiny"), encode(Tokenize(model="tiny", prompt="x")))
    assert await ids_of(client, prompt="x")


async def test_a_tokenizer_that_breaks_is_logged(
    client: TokenizerClient,
    tokenizer: ChatTokenizer,
    lines: LogLines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bug costs one question, not the service."""

    def breaks(text: str, *, add_special: bool) -> list[int]:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode", breaks)
        with pytest.raises(MeshError, match="failed"):
            await client.ask(Tokenize(model="tiny", prompt="x"))
    assert lines.events("question_failed")
    assert await ids_of(client, prompt="x")


async def test_permissions(connect: Connect, bus: Bus, until: Until) -> None:
    """Bridges and clients ask, nobody but control listens."""
    heard: list[Msg] = []
    await bus.subscribe(subjects.ALL_TOKENIZE, heard.append)
    for user in ("bridge", "client"):
        asker = await connect(user)
        await asker.publish(subjects.tokenize("tiny"), b"x")
        with pytest.raises(BusForbidden):
            await asker.subscribe(subjects.ALL_TOKENIZE, heard.append)
    await until(lambda: len(heard) == 2)


async def test_over_http_and_back(client: TokenizerClient) -> None:
    """vLLM's paths and shapes, through a bridge and the broker."""

    class Mesh(FakeClient):
        async def ask_tokenizer(self, question: Question) -> Tokenized | Detokenized:
            return await client.ask(question)

    transport = httpx.ASGITransport(app=build(Mesh()).bridge)
    async with httpx.AsyncClient(transport=transport, base_url="http://bridge") as http:
        body = {"model": MODEL, "prompt": TEXT, "add_special_tokens": True}
        said = (await http.post("/tokenize", json=body)).json()
        assert said["tokens"] == tiny_tokenizer().encode(TEXT).ids
        assert said["count"] == len(said["tokens"])
        assert said["max_model_len"] == card_of(Path()).context_length
        back = await http.post("/detokenize", json={"model": MODEL, "tokens": said["tokens"]})
        assert back.json() == {"prompt": TEXT}
        refused = await http.post("/detokenize", json={"model": MODEL, "tokens": [512]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
