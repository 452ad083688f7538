"""Clients as users write them: one on the bus, one over HTTP that reconnects and resumes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from loadgen.chaos.answer import Answer
from loadgen.chaos.cases import Case
from loadgen.chaos.deltas import take_deltas
from loadgen.chaos.resume import Resume
from loadgen.chaos.sse_text import RETRYABLE_STATUS, SseText, renewing
from loadgen.http_stream import BadHttp, HttpClient
from pipeline.client import MeshClient, new_request_id
from pipeline.token_stream import TokenStream
from schemas.errors import BusUnavailable, MeshError

RETRY_S = 0.1
RESUME_WINDOW_S = "30"  # a request outlives its client for so long
_LEAVE_S = 2.0
_COMPLETIONS = "/v1/completions"


class Client(Protocol):
    """One way to ask."""

    async def run(self, case: Case, label: str, answer: Answer) -> None:
        """Send ``case`` and read ``answer`` to its end, through whatever happens; cancelled, it
        leaves as a client leaves."""


class BusClient:
    """Publishes to admission and reads the token stream."""

    def __init__(self, client: MeshClient, model: str, timeout_s: float) -> None:
        self._client = client
        self._model = model
        self._timeout_s = timeout_s

    async def run(self, case: Case, label: str, answer: Answer) -> None:
        """See :class:`Client`."""
        answer.request_id = new_request_id()
        stream = await self._submit(case, label, answer)
        try:
            while deltas := await stream.next_deltas():
                take_deltas(answer, deltas)
            assert stream.end is not None, "complete"
            answer.reasons = list(stream.end.finish_reasons)
            answer.complete(stream.end.usage, time.monotonic())
        except MeshError as error:
            answer.fail(error.code, error.message)
        except asyncio.CancelledError:
            with contextlib.suppress(MeshError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await stream.aclose()
            raise

    async def _submit(self, case: Case, label: str, answer: Answer) -> TokenStream:
        """Published once the bus takes it; a repeat under the same id is harmless."""
        deadline = self._client.bus.now_unix_ms() + int(self._timeout_s * 1000)
        request = case.message(self._model, answer.request_id, label, deadline)
        while True:
            try:
                return await self._client.submit(request)
            except BusUnavailable:
                await asyncio.sleep(RETRY_S)


class SseClient:
    """``/v1/completions``, streamed, through any of ``urls``.

    A connection that breaks, or brings nothing for ``stall_s``, is left; the next server is asked
    for the rest. 429 and 503 are tried again, as the official client does.

    Args:
        is_mesh: send what only a mesh understands.
    """

    def __init__(
        self, urls: Sequence[str], model: str, resume: Resume, *, stall_s: float, is_mesh: bool
    ) -> None:
        self.urls = tuple(urls)
        self.stall_s = stall_s
        self._model = model
        self._resume = resume
        self._is_mesh = is_mesh
        self._turn = itertools.cycle(range(len(self.urls)))
        self.homes: dict[str, str] = {}  # label -> the server that it reads from
        self.not_coming_back: set[str] = set()  # labels: their requests end with the connection

    async def run(self, case: Case, label: str, answer: Answer) -> None:
        """See :class:`Client`."""
        at = next(self._turn)
        while not answer.has_ended:
            url = self.homes[label] = self.urls[at % len(self.urls)]
            try:
                if answer.request_id:
                    await self._resume.read_on(url, answer)
                else:
                    await self._post(url, case, label, answer)
            except (OSError, BadHttp, TimeoutError):
                pass  # the next server may do better
            except msgspec.DecodeError as error:
                answer.fail("bad_stream", str(error))
            if not answer.has_ended:
                answer.num_resumed += bool(answer.request_id)
                at += 1
                await asyncio.sleep(RETRY_S if answer.num_resumed > 1 else 0)

    async def _post(self, url: str, case: Case, label: str, answer: Answer) -> None:
        body, client = SseText(answer), HttpClient(url)
        headers = {"X-Request-Id": label}
        if self._is_mesh:
            headers["x-mesh-event-ids"] = "1"
            if label not in self.not_coming_back:
                headers["x-mesh-resume-window"] = RESUME_WINDOW_S
        try:
            async with asyncio.timeout(self.stall_s) as limit:
                status = await client.post(
                    _COMPLETIONS,
                    case.http_body(self._model, label, is_mesh=self._is_mesh),
                    renewing(limit, self.stall_s, body.on_body),
                    headers,
                )
        finally:
            client.close()
        body.judge(status)
        if status in RETRYABLE_STATUS:
            await asyncio.sleep(RETRY_S)
