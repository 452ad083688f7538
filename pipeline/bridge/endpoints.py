"""``/v1/chat/completions`` and ``/v1/completions``: from body to answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from infra.log import Logger
from infra.metrics import Metrics
from pipeline.access.charge import exact_charge, first_charge
from pipeline.access.door import OpenDoor
from pipeline.bridge.answers import Gathered, Identity
from pipeline.bridge.call import Call
from pipeline.bridge.chunks import ChatEvents, CompletionEvents
from pipeline.bridge.convert import Arrival, chat_requests, completion_requests, parse
from pipeline.bridge.cors import Cors
from pipeline.bridge.errors import ClientLeft, ShuttingDown
from pipeline.bridge.generate import Generation, opened
from pipeline.bridge.limits import Limits
from pipeline.bridge.metering import find_model, settle
from pipeline.bridge.note import ReaderNote
from pipeline.bridge.ports import AskTokenizer, Client, Models
from pipeline.bridge.slo import asked_slo, degraded_headers, naming_header
from pipeline.bridge.sse import Events, StreamForm
from pipeline.bridge.streamed import StreamedAnswer
from pipeline.bridge.windows import Windows
from schemas.errors import InvalidRequest, MeshError
from schemas.openai import ChatBody, CompletionBody, GenerationBody, StreamOptions
from schemas.requests import InferenceRequest
from schemas.tokens import TokenDelta, Usage

DEADLINE = b"x-mesh-deadline-ms"
EVENT_IDS = b"x-mesh-event-ids"
RESUME_WINDOW = b"x-mesh-resume-window"
_NO_OPTIONS = StreamOptions()
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What differs between chat and completions."""

    name: str  # in a ``ReaderNote``
    path: str
    id_prefix: str
    body: type[Any]
    requests: Callable[[Any, Arrival], list[InferenceRequest]]
    events: type[Events]
    whole: Callable[[Gathered, Identity, Sequence[str], Usage], msgspec.Struct]


CHAT = Endpoint(
    name="chat",
    path="/v1/chat/completions",
    id_prefix="chatcmpl-",
    body=ChatBody,
    requests=chat_requests,
    events=ChatEvents,
    whole=Gathered.chat,
)
COMPLETIONS = Endpoint(
    name="completions",
    path="/v1/completions",
    id_prefix="cmpl-",
    body=CompletionBody,
    requests=completion_requests,
    events=CompletionEvents,
    whole=Gathered.completion,
)
ENDPOINTS = {one.name: one for one in (CHAT, COMPLETIONS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the bridge works with. ``now_unix_ms`` is the bus's clock: deadlines are in its time."""

    client: Client
    models: Models
    ask_tokenizer: AskTokenizer
    metrics: Metrics
    log: Logger
    now_unix_ms: Callable[[], int]
    limits: Limits
    windows: Windows
    cors: Cors = field(default_factory=Cors)
    door: OpenDoor = field(default_factory=OpenDoor)


def identity_of(note: ReaderNote, request_id: str, generation: Generation) -> Identity:
    """What every event says of its stream. A model that answers for another gives its own name."""
    word = generation.accepted[0]
    return Identity(
        id=ENDPOINTS[note.endpoint].id_prefix + request_id,
        created=note.created_unix_s,
        model=word.model if word.asked_model else note.model,
        fingerprint=word.revision,
    )


def events_of(
    note: ReaderNote,
    request_id: str,
    generation: Generation,
    *,
    event_ids: bool,
    after_event: int = 0,
) -> Events:
    """The events of an open ``generation``: the same for all who know the note.

    Raises:
        InvalidRequest: the note names an endpoint that we don't have.
    """
    endpoint = ENDPOINTS.get(note.endpoint)
    if endpoint is None:
        raise InvalidRequest(f"no endpoint is called {note.endpoint[:64]!r}", param="request_id")
    return endpoint.events(
        identity_of(note, request_id, generation),
        StreamForm(
            include_usage=note.include_usage,
            continuous_usage=note.continuous_usage,
            event_ids=event_ids,
            counts_tokens=generation.accepted[0].max_tokens != 0,
        ),
        prompt_tokens=generation.prompt_tokens,
        echoes=generation.echoes,
        after_event=after_event,
    )


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
        window_s = self._window_s(call)
        note = self._note(body)
        arrival = Arrival(
            deadline_unix_ms=deadline_unix_ms,
            label=call.label,
            permit=call.permit,
            slo=call.permit.slo_of(asked_slo(call.headers)),
            note=note,
        )
        requests = self._endpoint.requests(body, arrival)
        self._describe(call, body, requests)
        find_model(call, self._services.models, body.model)
        if call.permit.is_counted:
            call.permit.enter(first_charge(requests))
        generation = self._generation(requests)
        ending: MeshError | None = None
        try:
            work = self._generate(call, body, requests, note, generation)
            await call.attended(work, left_s + self._limits.late_s)
        except MeshError as error:
            ending = error
            raise
        finally:
            reason = ending.message if ending else ""
            keeps = partial(self._keeps, call, ending, window_s)
            await generation.close(reason, keeps, self._services.log)
            settle(call, generation, ending)

    def _note(self, body: GenerationBody) -> ReaderNote:
        options = body.stream_options or _NO_OPTIONS
        return ReaderNote(
            endpoint=self._endpoint.name,
            model=body.model,
            created_unix_s=int(time.time()),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )

    def _generation(self, requests: Sequence[InferenceRequest]) -> Generation:
        openers = [partial(self._services.client.submit, request) for request in requests]
        return Generation(openers, requests[0].sampling.n)

    def _keeps(
        self, call: Call, ending: MeshError | None, window_s: float, request_id: str
    ) -> bool:
        """Whether a request whose answer broke off may run on: its client asked for that, or
        somebody else reads it. A client that was told no id can't come back."""
        if not call.was_told or not isinstance(ending, ClientLeft | ShuttingDown):
            return False
        windows = self._services.windows
        if not window_s and windows.is_adopted(request_id):
            window_s = windows.longest_s
        if not window_s:
            return False
        # At a shutdown nobody would look after it here; the control process does.
        keeps = isinstance(ending, ShuttingDown) or windows.wait_for_client(request_id, window_s)
        call.runs_on |= keeps
        return keeps

    def _window_s(self, call: Call) -> float:
        """For how long the request runs on without its client; the answer says it, as it may be
        less than was asked for."""
        given = call.headers.get(RESUME_WINDOW)
        if given is None:
            return 0.0
        if not _SECONDS.match(given):
            name = RESUME_WINDOW.decode()
            raise InvalidRequest(f"{name} is no number of seconds", param=name)
        window_s = min(float(given), self._services.windows.longest_s)
        call.answer_headers.append((RESUME_WINDOW, f"{window_s:g}".encode()))
        return window_s

    def _left_s(self, call: Call) -> float:
        given = call.headers.get(DEADLINE)
        if given is None:
            return self._limits.default_deadline_s
        if not given.isdigit() or len(given) > 12 or int(given) == 0:
            name = DEADLINE.decode()
            raise InvalidRequest(f"{name} is no positive number of milliseconds", param=name)
        return min(int(given) / 1000, self._limits.max_deadline_s)

    @staticmethod
    def _describe(call: Call, body: GenerationBody, requests: Sequence[InferenceRequest]) -> None:
        call.request_id = requests[0].request_id
        call.facts |= {"model": body.model, "prompts": len(requests), "n": requests[0].sampling.n}

    async def _generate(
        self,
        call: Call,
        body: GenerationBody,
        requests: Sequence[InferenceRequest],
        note: ReaderNote,
        generation: Generation,
    ) -> None:
        await self._open(call, generation)
        if call.permit.is_counted:
            call.permit.confirm(exact_charge(requests, generation.accepted))
        call.facts["prompt_tokens"] = generation.prompt_tokens
        if body.stream:
            await self._stream(call, note, generation)
        else:
            await self._whole(call, identity_of(note, call.request_id, generation), generation)
        call.facts |= generation.facts

    async def _open(self, call: Call, generation: Generation) -> None:
        """Wait for admission's word; what it made of the request is told in headers."""
        try:
            await opened(call, generation, self._limits.accept_s)
        except InvalidRequest as error:
            raise naming_header(error) from error
        call.answer_headers += degraded_headers(generation.accepted)
        word = generation.accepted[0]
        if word.asked_model:
            call.facts["answered_by"] = word.model
        if word.asked_max_tokens:
            call.facts["clamped_max_tokens"] = word.max_tokens

    async def _stream(self, call: Call, note: ReaderNote, generation: Generation) -> None:
        """Event ids are left out unless asked for: there are readers that take each event for one
        ``data:`` line."""
        wants_ids = call.headers.get(EVENT_IDS, b"0") not in (b"0", b"false")
        may_resume = RESUME_WINDOW in call.headers
        events = events_of(note, call.request_id, generation, event_ids=wants_ids or may_resume)
        await StreamedAnswer(
            call,
            generation,
            events,
            metrics=self._services.metrics,
            keep_alive_s=self._limits.keep_alive_s,
        ).run()

    async def _whole(self, call: Call, about: Identity, generation: Generation) -> None:
        gathered = Gathered(generation.echoes)

        def take(first: int, deltas: Sequence[TokenDelta]) -> bool:
            for delta in deltas:
                gathered.add(first + delta.index, delta)
            return True

        async def sink(first: int, deltas: Sequence[TokenDelta]) -> None:
            take(first, deltas)

        await generation.run(sink, take)
        settle(call, generation, None)  # so that the answer's headers say what is left
        answer = self._endpoint.whole(gathered, about, generation.reasons, generation.usage)
        await call.respond(200, answer)
