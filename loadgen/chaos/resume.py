"""How a client reads on where a broken connection left its request."""

from __future__ import annotations

import asyncio
from typing import Protocol

from loadgen.chaos.answer import Answer
from loadgen.chaos.sse_text import SseText, renewing
from loadgen.http_stream import HttpClient


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
