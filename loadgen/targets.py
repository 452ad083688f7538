"""The two ways in: an OpenAI-compatible server over HTTP, and the bus itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from loadgen.http_stream import HttpClient
from loadgen.measure import RequestResult
from loadgen.settings import Endpoint, LoadSettings
from loadgen.sse_answer import SseAnswer
from loadgen.workload import LoadRequest
from schemas.errors import MeshError

if TYPE_CHECKING:
    from loadgen.driver import Target
    from pipeline.client import MeshClient
    from pipeline.token_stream import TokenStream

CANCEL_TIMEOUT_S = 1.0


@asynccontextmanager
async def open_target(settings: LoadSettings) -> AsyncGenerator[Target, None]:
    """The target that ``settings`` name, for the length of the block.

    Raises:
        BusUnavailable: no broker at a nats:// address.
    """
    if settings.target.startswith(("http://", "https://")):
        http = HttpTarget(
            settings.target,
            settings.endpoint,
            api_key=settings.api_key,
            tenant_keys=settings.tenant_keys,
        )
        try:
            yield http
        finally:
            http.close()
    else:
        from pipeline.client import MeshClient

        async with MeshClient.connect(settings.target) as client:
            yield BusTarget(client, timeout_s=settings.timeout_s)


class HttpTarget:
    """``/v1/completions`` or ``/v1/chat/completions``, streamed, with usage.

    Args:
        api_key: of all whose tenant is not among ``tenant_keys``.
    """

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        *,
        api_key: str = "",
        tenant_keys: Mapping[str, str] | None = None,
    ) -> None:
        self._client = HttpClient(url.rstrip("/").removesuffix("/v1"))
        self._api_key = api_key
        self._tenant_keys = tenant_keys or {}
        self._path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"

    async def run(self, request: LoadRequest, result: RequestResult) -> None:
        """See :class:`loadgen.driver.Target`; a cancelled request's connection is closed."""
        answer = SseAnswer(result)
        status = await self._client.post(
            self._path,
            request.http_body(),
            answer.on_body,
            self._headers(request),
        )
        answer.finish(status)

    def _headers(self, request: LoadRequest) -> dict[str, str]:
        key = self._tenant_keys.get(request.tenant, self._api_key)
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        return {"X-Request-Id": request.request_id} | authorization

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()


class BusTarget:
    """Requests published to admission, tokens read from the bus: no bridge between.

    A request's deadline on the bus is a little after ``timeout_s``, at which the driver gives it
    up: only a generator that died leaves the end to the deadline.
    """

    def __init__(self, client: MeshClient, *, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def run(self, request: LoadRequest, result: RequestResult) -> None:
        """See :class:`loadgen.driver.Target`; a cancelled request is cancelled on the bus."""
        timeout_ms = int((self._timeout_s + CANCEL_TIMEOUT_S) * 1e3)
        deadline_unix_ms = self._client.bus.now_unix_ms() + timeout_ms
        stream = await self._client.submit(request.bus_message(deadline_unix_ms))
        try:
            await _read(stream, result)
        except asyncio.CancelledError:
            with suppress(MeshError, TimeoutError):
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await stream.aclose()
            raise


async def _read(stream: TokenStream, result: RequestResult) -> None:
    while deltas := await stream.next_deltas():
        now_s = time.monotonic()
        for delta in deltas:
            result.add_event(now_s, len(delta.ids))
            if delta.finish_reason is not None:
                result.end_s = now_s
    end = stream.end
    assert end is not None, "a complete stream has its StreamEnd"
    result.complete(end.usage, is_count_exact=True)
