"""Which web pages may call the bridge from a browser, and what they may read of its answers.

Off unless origins are configured. For a listed origin the browser may also send what it holds for
us (cookies of a proxy in front, client certificates); for ``*`` it may not, as the Fetch standard
has it: an API key in ``Authorization`` is no such thing and goes with both. A page of another
origin is told nothing, so that its browser keeps our answer from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Header = tuple[bytes, bytes]

_METHODS = b"GET, HEAD, POST"
_MAX_AGE_S = 600
_TOKENS = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,2048}\Z")
_RATES = [
    f"x-ratelimit-{what}-{unit}"
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
]
EXPOSED = (
    "x-request-id", "x-mesh-request-id", "x-mesh-resume-window", "retry-after",
    "retry-after-ms", "x-should-retry", "openai-processing-ms", "x-mesh-asked-model",
    "x-mesh-clamped-max-tokens", *_RATES,
)  # fmt: skip


class Cors:
    """The rule for ``origins``, as browsers write them in small letters, or ``*``; none: off."""

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self._allows_all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def allows(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a page of the request's origin may read the answer."""
        origin = headers.get(b"origin", b"").lower()
        return bool(origin) and (self._allows_all or origin in self._origins)

    def is_preflight(self, method: str, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a browser asks for leave, instead of a page for an answer."""
        if method != "OPTIONS" or not self._origins:
            return False
        return b"origin" in headers and b"access-control-request-method" in headers

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> list[Header]:
        """What every answer to a request with ``headers`` carries, errors too."""
        if not self._origins:
            return []
        found = self._common(headers)
        if self.allows(headers):
            found.append((b"access-control-expose-headers", ", ".join(EXPOSED).encode()))
        return found

    def preflight_headers(self, headers: Mapping[bytes, bytes]) -> list[Header]:
        """The leave itself: methods, and the headers asked for. OpenAI's clients send many of
        their own, so a page that may call may send what it likes."""
        found = [
            *self._common(headers),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", b"%d" % _MAX_AGE_S),
        ]
        asked = headers.get(b"access-control-request-headers", b"")
        if _TOKENS.match(asked):
            found.append((b"access-control-allow-headers", asked))
        return found

    def _common(self, headers: Mapping[bytes, bytes]) -> list[Header]:
        if self._allows_all:
            return [(b"access-control-allow-origin", b"*")]
        found = [(b"vary", b"origin")]  # also for those whom it refuses: caches must not mix them
        if self.allows(headers):
            found += [
                (b"access-control-allow-origin", headers[b"origin"]),
                (b"access-control-allow-credentials", b"true"),
            ]
        return found
