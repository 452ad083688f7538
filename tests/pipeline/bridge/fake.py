"""A mesh of one object: the client's interface with scripted answers, and bridges made with it."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings

from infra.health import Health
from infra.http_server import http_server
from infra.log import make_logger
from infra.metrics import Metrics
from infra.times import Times
from pipeline.access.door import OpenDoor
from pipeline.bridge.endpoints import Services
from pipeline.bridge.limits import Limits
from pipeline.bridge.listener import listen
from pipeline.bridge.routes import Bridge
from pipeline.bridge.windows import Windows
from schemas import subjects
from schemas.codec import pack_ids, unpack_ids
from schemas.errors import MeshError
from schemas.models import ModelCard
from schemas.requests import InferenceRequest, RequestRecord
from schemas.tokenize import Detokenize, Detokenized, Question, Tokenized
from schemas.tokens import (
    Accepted,
    StreamEnd,
    TokenDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)

MODEL = "org/tiny.model"
CARD = ModelCard(
    name=MODEL,
    revision="r1",
    served="x@r1",
    folder="/nowhere",
    architecture="LlamaForCausalLM",
    context_length=2048,
    vocab_size=512,
    has_chat_template=True,
    created_unix_s=1_700_000_000,
)
WORDS = ("Hello", " wörld", " 😀", "!")
NOW_UNIX_MS = 1_800_000_000_000
READER = subjects.bridge_reader("bridge-test-1")

# Property tests are bounded by the time limit per test; how long one example takes on a busy
# machine is no property.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

Step = Sequence[TokenDelta] | MeshError | asyncio.Event


@dataclass
class Script:
    """What happens to one request. An event as a step is waited for; None as accepted never
    comes."""

    steps: list[Step]
    end: StreamEnd | None
    refusal: MeshError | None = None
    submit_error: Exception | None = None
    silent: bool = False
    echo_text: str | None = None
    is_durable: bool = True


def logprob(text: str, top: int) -> TokenLogprob:
    """A token with ``top`` alternatives."""
    others = tuple(TopLogprob(token_id=i, token=f"t{i}", logprob=-1.0 - i) for i in range(top))
    return TokenLogprob(token_id=7, token=text, logprob=-0.5, top=others)


def say(request: InferenceRequest, words: Sequence[str] = WORDS, reason: str = "stop") -> Script:
    """Each choice says ``words``, one token each, all choices step by step; behind its prompt's
    logprobs, where asked for, which are one per letter."""
    n, top = request.sampling.n, request.sampling.logprobs
    is_answered = request.sampling.max_tokens != 0
    if not is_answered:  # one token, hidden
        words, reason, top = ("",), "length", None
    prompt_top, letters = request.sampling.prompt_logprobs, str(request.prompt)
    scores = None if prompt_top is None else tuple(logprob(one, prompt_top) for one in letters)
    steps: list[Step] = [
        [
            TokenDelta(
                request_id=request.request_id,
                epoch=1,
                number=number,
                ids=(number,),
                text=word,
                index=index,
                finish_reason=reason if number == len(words) - 1 else None,
                logprobs=None if top is None else (logprob(word, top),),
                prompt_logprobs=scores if number == 0 else None,
            )
            for index in range(n)
        ]
        for number, word in enumerate(words)
    ]
    end = StreamEnd(
        request_id=request.request_id,
        epoch=1,
        num_tokens=(len(words),) * n,
        finish_reasons=(reason,) * n,
        usage=Usage(
            prompt_tokens=5, completion_tokens=len(words) * n * is_answered, cached_tokens=2
        ),
    )
    echo = request.prompt if request.echo and isinstance(request.prompt, str) else None
    return Script(steps=steps, end=end, echo_text=echo)


def spell(question: Question) -> Tokenized | Detokenized:
    """A tokenizer whose ids are code points."""
    if isinstance(question, Detokenize):
        return Detokenized(text="".join(map(chr, unpack_ids(question.ids))))
    text = question.prompt or "".join(str(m.content) for m in question.messages or ())
    return Tokenized(ids=pack_ids([ord(c) for c in text]), max_model_len=CARD.context_length)


class FakeStream:
    """A scripted token stream."""

    def __init__(self, request: InferenceRequest, script: Script) -> None:
        self.request = request
        self.request_id = request.request_id
        self.end: StreamEnd | None = None
        self.cancelled: list[str] = []
        self.was_left = False
        self.is_closed = asyncio.Event()
        self.failed = False
        self.num_tokens = 0
        self.num_looks = 0  # at whether it is durable
        self._script = script
        self._steps = deque(script.steps)

    @property
    def is_ending(self) -> bool:
        return not self._steps and self._script.end is not None

    @property
    def is_durable(self) -> bool:
        self.num_looks += 1
        return self._script.is_durable

    async def accepted(self) -> Accepted:
        if self._script.refusal:
            self.failed = True
            raise self._script.refusal
        if self._script.silent:
            await asyncio.Event().wait()
        return Accepted(
            request_id=self.request_id,
            model=self.request.model,
            revision="r1",
            prompt_tokens=5,
            max_tokens=0 if self.request.sampling.max_tokens == 0 else 16,
            admitted_unix_ms=NOW_UNIX_MS,
            deadline_unix_ms=self.request.deadline_unix_ms or 0,
            echo_text=self._script.echo_text,
        )

    async def next_deltas(self) -> list[TokenDelta]:
        while self._steps:
            step = self._steps.popleft()
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, MeshError):
                self.failed = True
                raise step
            else:
                self.num_tokens += sum(len(delta.ids) for delta in step)
                return list(step)
        self.end = self._script.end
        return []

    def follow(self, take: Callable[[Sequence[TokenDelta]], bool] | None) -> None:
        """Everything is told by ``next_deltas``."""

    async def cancel(self, reason: str = "") -> None:
        if self.end is None and not self.failed and not self.cancelled:
            self.cancelled.append(reason)

    def leave(self) -> None:
        self.was_left = True
        self.is_closed.set()

    async def aclose(self) -> None:
        await self.cancel("reader left")
        self.is_closed.set()


@dataclass
class FakeClient:
    """Submits to a script. What was submitted can be resumed: the script is played again."""

    script: Callable[[InferenceRequest], Script] = say
    streams: list[FakeStream] = field(default_factory=list)
    resumed: list[FakeStream] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    tokenizer: Callable[[Question], Tokenized | Detokenized] = spell

    async def ask_tokenizer(self, question: Question) -> Tokenized | Detokenized:
        return self.tokenizer(question)

    async def submit(self, request: InferenceRequest) -> FakeStream:
        script = self.script(request)
        if script.submit_error:
            raise script.submit_error
        stream = FakeStream(request, script)
        self.streams.append(stream)
        self.submitted.set()
        return stream

    async def record(self, request_id: str) -> tuple[int, RequestRecord] | None:
        subjects.check_request_id(request_id)
        for seq, request in enumerate(self.requests, 1):
            if request.request_id == request_id:
                return seq, record_of(request)
        return None

    @contextlib.asynccontextmanager
    async def resume(
        self, request_id: str, *, reader: str, start_seq: int, record: RequestRecord
    ) -> AsyncIterator[FakeStream]:
        request = self.requests[start_seq - 1]
        assert (request.request_id, reader) == (request_id, READER)
        stream = FakeStream(request, self.script(request))
        self.resumed.append(stream)
        try:
            yield stream
        finally:
            stream.leave()

    @property
    def requests(self) -> list[InferenceRequest]:
        return [stream.request for stream in self.streams]


def record_of(request: InferenceRequest) -> RequestRecord:
    """What admission would write."""
    return RequestRecord(
        request_id=request.request_id,
        model=request.model,
        revision="r1",
        served="x@r1",
        prompt_ids=b"",
        sampling=request.sampling,
        reader=READER,
        admitted_unix_ms=NOW_UNIX_MS,
        deadline_unix_ms=request.deadline_unix_ms or 0,
        tenant=request.tenant,
        reader_note=request.reader_note,
    )


class FakeModels:
    """One registered model."""

    def get(self, name: str) -> ModelCard | None:
        return CARD if name == MODEL else None

    def cards(self) -> list[ModelCard]:
        return [CARD]


class Log(io.StringIO):
    """Log lines; ``ended`` is set with the first canonical line of a request."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = asyncio.Event()

    def write(self, text: str) -> int:
        if "request_ended" in text:
            self.ended.set()
        return super().write(text)


@dataclass
class House:
    """A bridge and what it was made with."""

    bridge: Bridge
    client: FakeClient
    metrics: Metrics
    health: Health
    limits: Limits
    output: Log
    windows: Windows
    adopted: list[str]  # what was said on the bus to be read here
    given_up: list[str]  # what was cancelled when its window ended

    def count(self, outcome: str) -> float:
        value = self.metrics.registry.get_sample_value(
            "mesh_requests_ended_total", {"outcome": outcome}
        )
        return value or 0.0

    async def all_closed(self) -> None:
        async with asyncio.timeout(60):
            for stream in self.client.streams:
                await stream.is_closed.wait()


def build(
    client: FakeClient | None = None, limits: Limits | None = None, door: OpenDoor | None = None
) -> House:
    """A bridge with a fake mesh behind it; without a ``door`` everybody may enter."""
    client = client or FakeClient()
    limits = limits or Limits()
    output = Log()
    metrics, health = Metrics(), Health()
    log = make_logger("bridge-test", stream=output)
    adopted: list[str] = []
    given_up: list[str] = []

    async def announce(request_ids: Sequence[str]) -> None:
        adopted.extend(request_ids)

    async def cancel(request_id: str, reason: str) -> None:
        given_up.append(request_id)

    windows = Windows(announce, cancel, Times(), log, max_waiting=2)
    services = Services(
        client=client,
        models=FakeModels(),
        ask_tokenizer=client.ask_tokenizer,
        metrics=metrics,
        log=log,
        now_unix_ms=lambda: NOW_UNIX_MS,
        limits=limits,
        windows=windows,
        door=door or OpenDoor(),
    )
    bridge = Bridge("bridge-test", health, services)
    return House(bridge, client, metrics, health, limits, output, windows, adopted, given_up)


@contextlib.asynccontextmanager
async def served(house: House) -> AsyncIterator[int]:
    """The bridge behind a real uvicorn; gives the port."""
    with listen("127.0.0.1", 0, house.limits.stall_s) as bound:
        async with http_server(house.bridge, bound):
            yield bound.getsockname()[1]


def chat(**more: object) -> dict[str, object]:
    """A chat body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **more}


def completion(**more: object) -> dict[str, object]:
    """A completions body."""
    return {"model": MODEL, "prompt": "Once", **more}
