"""Which pages may call from a browser."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest

from pipeline.bridge.cors import EXPOSED, Cors
from pipeline.bridge.routes import Bridge
from tests.pipeline.bridge.fake import House, build, chat

CHAT = "/v1/chat/completions"
PAGE = "https://ui.example"


def browser(house: House, *origins: str) -> httpx.AsyncClient:
    services = replace(house.bridge._services, cors=Cors(origins))
    bridge = Bridge("bridge-test", house.health, services)
    return httpx.AsyncClient(transport=httpx.ASGITransport(bridge), base_url="http://mesh")


def said(response: httpx.Response) -> dict[str, str]:
    """What the answer says of origins."""
    wanted = ("access-control-", "vary")
    return {k: v for k, v in response.headers.items() if k.startswith(wanted)}


ASKS = {"origin": PAGE, "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os"}  # fmt: skip


async def test_off_by_default() -> None:
    """No page is told anything; a preflight is a method that is not there."""
    async with browser(build()) as client:
        assert said(await client.get("/v1/models", headers={"origin": PAGE})) == {}
        preflight = await client.options(CHAT, headers=ASKS)
        assert (preflight.status_code, said(preflight)) == (405, {})


async def test_a_listed_page_may_call_and_read() -> None:
    """The preflight lets it send the headers it asks for; the answer, streamed or refused, lets it
    read what a client needs. Caches are told that others get another answer."""
    async with browser(build(), PAGE, "http://localhost:3000") as client:
        preflight = await client.options(CHAT, headers=ASKS)
        assert preflight.status_code == 204
        leave = said(preflight)
        assert leave["access-control-allow-origin"] == PAGE
        assert leave["access-control-allow-headers"] == "authorization,x-stainless-os"
        assert "POST" in leave["access-control-allow-methods"]
        for body in (chat(), chat(stream=True), chat(n=0)):
            answer = said(await client.post(CHAT, json=body, headers={"origin": PAGE}))
            assert answer == {
                "access-control-allow-origin": PAGE,
                "access-control-allow-credentials": "true",
                "access-control-expose-headers": ", ".join(EXPOSED),
                "vary": "origin",
            }
        assert said(await client.get("/health", headers={"origin": PAGE}))


async def test_another_page_is_told_nothing() -> None:
    """It is refused at the preflight, in words for whoever looks; a simple request is answered, and
    its browser keeps the answer."""
    async with browser(build(), PAGE) as client:
        preflight = await client.options(CHAT, headers={**ASKS, "origin": "https://evil.example"})
        assert preflight.status_code == 403
        assert preflight.json()["error"]["code"] == "origin_refused"
        for origin in ("https://evil.example", "null", PAGE + ".evil.example", PAGE + ":8443"):
            answer = await client.get("/v1/models", headers={"origin": origin})
            assert said(answer) == {"vary": "origin"}
        assert said(await client.get("/v1/models")) == {"vary": "origin"}


async def test_any_page_may_call_without_credentials() -> None:
    """``*`` and credentials never go together."""
    async with browser(build(), "*") as client:
        for answer in (
            await client.options(CHAT, headers=ASKS),
            await client.get("/v1/models", headers={"origin": "null"}),
        ):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("asked", ["a\r\nb: c", "x" * 5000, "(", ""])
async def test_only_header_names_come_back(asked: str) -> None:
    """What is asked for is said again, unless it can be none."""
    headers = {b"origin": PAGE.encode(), b"access-control-request-headers": asked.encode()}
    names = dict(Cors([PAGE]).preflight_headers(headers))
    assert b"access-control-allow-headers" not in names
    assert names[b"access-control-allow-origin"] == PAGE.encode()
