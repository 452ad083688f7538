"""How a client reads on where a broken connection left its request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from loadgen.chaos.answer import Answer
from loadgen.chaos.deltas import take_deltas
from loadgen.chaos.sse_text import SseText, renewing
from loadgen.http_stream import HttpClient
from pipeline.client import MeshClient
from schemas.errors import BusUnavailable, MeshError


class Resume(Protocol):
    """Reads on where a broken connection left a request."""

    async def read_on(self, url: str, answer: Answer) -> None:
        """Bring ``answer`` further; it may still not have ended.

        Raises:
            OSError, BadHttp, TimeoutError: this server can't, just now.
        """


class NoResume:
    """For servers that have none: a broken stream is a failed request."""

    async def read_on(self, url: str, answer: Answer) -> None:
        """See :class:`Resume`."""
        answer.fail("stream_broken", "the connection broke, and this server can't resume")


class HttpResume:
    """``GET /v1/requests/<id>/events`` with ``Last-Event-ID``, at any bridge."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s

    async def read_on(self, url: str, answer: Answer) -> None:
        """See :class:`Resume`."""
        body = SseText(answer)
        path = f"/v1/requests/{answer.request_id}/events"
        client = HttpClient(url)
        try:
            async with asyncio.timeout(self._stall_s) as limit:
                status = await client.get(
                    path, renewing(limit, self._stall_s, body.on_body),
                    {"Last-Event-ID": answer.last_event_id, "x-mesh-event-ids": "1"},
                )  # fmt: skip
        finally:
            client.close()
        body.judge(status)


class BusResume:
    """Reads the stream of a bridge's request on the bus, from its first token.

    What the HTTP client had read must be how the whole begins; else both parts are kept, and the
    comparison shows it.

    Args:
        client: of a user who may read the streams of bridges.
        reader_of: the reader that a request was submitted with.
    """

    def __init__(self, client: MeshClient, reader_of: Callable[[str], str]) -> None:
        self._client = client
        self._reader_of = reader_of

    async def read_on(self, url: str, answer: Answer) -> None:
        """See :class:`Resume`."""
        whole = Answer(answer.num_choices)
        reader = self._reader_of(answer.request_id)
        try:
            async with self._client.resume(answer.request_id, reader=reader) as stream:
                async for delta in stream:
                    take_deltas(whole, [delta])
                    answer.event_s.append(whole.event_s[-1])
        except BusUnavailable as error:
            raise ConnectionError(error.message) from error
        except MeshError as error:
            answer.fail(error.code, error.message)
            return
        assert stream.end is not None, "complete"
        for index, text in enumerate(whole.texts):
            had = answer.texts[index]
            answer.texts[index] = text if text.startswith(had) else had + text
        answer.reasons = list(stream.end.finish_reasons)
        answer.complete(stream.end.usage, time.monotonic())
