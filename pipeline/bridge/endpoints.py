"""``/v1/chat/completions`` and ``/v1/completions``: from body to answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from infra.log import Logger
from infra.metrics import Metrics
from pipeline.bridge.answers import Gathered, Identity
from pipeline.bridge.call import Call
from pipeline.bridge.convert import Arrival, chat_requests, completion_requests, parse
from pipeline.bridge.generate import Generation, StreamedAnswer
from pipeline.bridge.limits import Limits
from pipeline.bridge.ports import Client, Models
from pipeline.bridge.sse import ChatEvents, CompletionEvents, Events, StreamForm
from schemas.errors import InvalidRequest, MeshError, ModelNotFound
from schemas.openai import ChatBody, CompletionBody, GenerationBody, StreamOptions
from schemas.requests import InferenceRequest
from schemas.tokens import TokenDelta, Usage

DEADLINE = b"x-mesh-deadline-ms"
EVENT_IDS = b"x-mesh-event-ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What differs between chat and completions."""

    path: str
    id_prefix: str
    body: type[Any]
    requests: Callable[[Any, Arrival], list[InferenceRequest]]
    events: type[Events]
    whole: Callable[[Gathered, Identity, Sequence[str], Usage], msgspec.Struct]


CHAT = Endpoint(
    path="/v1/chat/completions",
    id_prefix="chatcmpl-",
    body=ChatBody,
    requests=chat_requests,
    events=ChatEvents,
    whole=Gathered.chat,
)
COMPLETIONS = Endpoint(
    path="/v1/completions",
    id_prefix="cmpl-",
    body=CompletionBody,
    requests=completion_requests,
    events=CompletionEvents,
    whole=Gathered.completion,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the bridge works with. ``now_unix_ms`` is the bus's clock: deadlines are in its time."""

    client: Client
    models: Models
    metrics: Metrics
    log: Logger
    now_unix_ms: Callable[[], int]
    limits: Limits


class Generator:
    """Answers the requests of one endpoint."""

    def __init__(self, endpoint: Endpoint, services: Services) -> None:
        self._endpoint = endpoint
        self._services = services
        self._limits = services.limits

    async def answer(self, call: Call) -> None:
        """Read the body, submit, answer.

        Raises:
            MeshError: refused or failed, maybe after the answer has begun.
        """
        data = await call.read_body(self._limits.max_body_bytes, self._limits.body_s)
        body: GenerationBody = parse(data, self._endpoint.body)
        left_s = self._left_s(call)
        deadline_unix_ms = self._services.now_unix_ms() + int(left_s * 1000)
        arrival = Arrival(deadline_unix_ms=deadline_unix_ms, label=call.label)
        requests = self._endpoint.requests(body, arrival)
        self._note(call, body, requests)
        if self._services.models.get(body.model) is None:
            raise ModelNotFound(f"no model is called {body.model!r}", param="model")
        generation = Generation(self._services.client, requests)
        reason = ""
        try:
            work = self._generate(call, body, generation)
            await call.attended(work, left_s + self._limits.late_s)
        except MeshError as error:
            reason = error.message
            raise
        finally:
            await generation.close(reason, self._services.log)

    def _left_s(self, call: Call) -> float:
        given = call.headers.get(DEADLINE)
        if given is None:
            return self._limits.default_deadline_s
        if not given.isdigit() or len(given) > 12 or int(given) == 0:
            name = DEADLINE.decode()
            raise InvalidRequest(f"{name} is no positive number of milliseconds", param=name)
        return min(int(given) / 1000, self._limits.max_deadline_s)

    @staticmethod
    def _note(call: Call, body: GenerationBody, requests: Sequence[InferenceRequest]) -> None:
        call.request_id = requests[0].request_id
        call.facts |= {"model": body.model, "prompts": len(requests), "n": requests[0].sampling.n}

    async def _generate(self, call: Call, body: GenerationBody, generation: Generation) -> None:
        await generation.open(self._limits.accept_s)
        call.facts["prompt_tokens"] = generation.prompt_tokens
        about = Identity(
            id=self._endpoint.id_prefix + call.request_id,
            created=int(time.time()),
            model=body.model,
            fingerprint=generation.accepted[0].revision,
        )
        if body.stream:
            await self._stream(call, about, body.stream_options or StreamOptions(), generation)
        else:
            await self._whole(call, about, generation)
        usage, reasons = generation.usage, generation.reasons
        call.facts |= {
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish_reason": "length" if "length" in reasons else "stop",
        }

    async def _stream(
        self, call: Call, about: Identity, options: StreamOptions, generation: Generation
    ) -> None:
        events = self._endpoint.events(
            about,
            StreamForm(
                include_usage=bool(options.include_usage),
                continuous_usage=bool(options.continuous_usage_stats),
                event_ids=call.headers.get(EVENT_IDS, b"0") not in (b"0", b"false"),
            ),
            prompt_tokens=generation.prompt_tokens,
            echoes=generation.echoes,
        )
        await StreamedAnswer(
            call,
            generation,
            events,
            metrics=self._services.metrics,
            keep_alive_s=self._limits.keep_alive_s,
        ).run()

    async def _whole(self, call: Call, about: Identity, generation: Generation) -> None:
        gathered = Gathered(generation.echoes)

        async def gather(first: int, deltas: Sequence[TokenDelta]) -> None:
            for delta in deltas:
                gathered.add(first + delta.index, delta)

        await generation.run(gather)
        answer = self._endpoint.whole(gathered, about, generation.reasons, generation.usage)
        await call.respond(200, answer)
