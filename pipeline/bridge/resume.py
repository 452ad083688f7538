"""``GET /v1/requests/<id>/events``: a stream read on from any event, through any bridge."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from urllib.parse import parse_qs

from pipeline.bridge.call import Call
from pipeline.bridge.endpoints import Services, events_of
from pipeline.bridge.errors import RequestNotFound
from pipeline.bridge.generate import Generation, opened
from pipeline.bridge.note import ReaderNote
from pipeline.bridge.streamed import StreamedAnswer
from schemas.errors import InvalidRequest, SchemaError
from schemas.requests import RequestRecord

PREFIX, SUFFIX = "/v1/requests/", "/events"
LAST_EVENT_ID = b"last-event-id"
_QUERY = "last_event_id"


class Resumer:
    """Follows requests that another connection began."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limits = services.limits

    async def answer(self, call: Call) -> None:
        """All events after ``Last-Event-ID``, live to the end.

        Any number may read one request at once; one that leaves ends nothing.

        Raises:
            RequestNotFound: unknown, forgotten, another tenant's, or with a model that the caller
                may not use.
            InvalidRequest: it has several prompts, whose events have no one order; it did not
                come through a bridge; the id is no number, or one that the stream has not.
            MeshError: with which the request itself ended.
        """
        call.is_resumed = True
        after_event = _last_event_id(call)
        seq, record = await self._find(call)
        note = ReaderNote.unpacked(record.reader_note)
        if note.num_prompts > 1:
            raise InvalidRequest(
                f"a batch of {note.num_prompts} prompts can't be resumed", param="request_id"
            )
        if not call.permit.may_use(note.model):
            raise _unknown(record.request_id)
        call.request_id = record.request_id
        call.facts |= {"model": note.model, "after_event": after_event}
        left_s = (record.deadline_unix_ms - self._services.now_unix_ms()) / 1000
        work = self._read_on(call, seq, record, note, after_event)
        await call.attended(work, max(left_s + self._limits.late_s, self._limits.replay_s))

    async def _find(self, call: Call) -> tuple[int, RequestRecord]:
        request_id = call.path.removeprefix(PREFIX).removesuffix(SUFFIX)
        try:
            found = await self._services.client.record(request_id)
        except SchemaError:
            found = None  # what can be no id is none
        if found is None or found[1].tenant != call.tenant:
            raise _unknown(request_id)
        return found

    async def _read_on(
        self, call: Call, seq: int, record: RequestRecord, note: ReaderNote, after_event: int
    ) -> None:
        services = self._services
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(services.windows.adopted(record.request_id))
            stream = services.client.resume(
                record.request_id, reader=record.reader, start_seq=seq, record=record
            )
            opener = partial(stack.enter_async_context, stream)
            generation = Generation([opener], record.sampling.n)
            await opened(call, generation, self._limits.accept_s)
            events = events_of(
                note, record.request_id, generation, event_ids=True, after_event=after_event
            )
            answer = StreamedAnswer(
                call, generation, events, metrics=None, keep_alive_s=self._limits.keep_alive_s
            )
            await answer.run()
            call.facts |= generation.facts


def _unknown(request_id: str) -> RequestNotFound:
    return RequestNotFound(f"no request {request_id[:64]!r} is known", param="request_id")


def _last_event_id(call: Call) -> int:
    """The header, which is newer where a browser reconnects, else the query; 0 without either."""
    given = call.headers.get(LAST_EVENT_ID, b"").decode("latin-1").strip()
    if not given:
        given = parse_qs(call.query.decode("latin-1")).get(_QUERY, ["0"])[-1]
    if not (given.isascii() and given.isdigit() and len(given) <= 12):
        raise InvalidRequest("Last-Event-ID is no event number", param=_QUERY)
    return int(given)
