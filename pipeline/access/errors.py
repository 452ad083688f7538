"""Why a caller is turned away at the door."""

from __future__ import annotations

import math

from schemas.errors import InvalidRequest, MeshError, OverBudget, QueueFull


class InvalidApiKey(InvalidRequest):
    """No key, or one that opens nothing."""

    code = "invalid_api_key"
    http_status = 401


class RateLimited(QueueFull):
    """A limit of the caller's key is reached; no other caller is concerned.

    ``retry_after_s`` is when the same request fits if nobody else uses the key meanwhile, or a
    second where nobody can tell.
    """

    code = "rate_limit_exceeded"


class OverLimit(RateLimited):
    """The request is over a limit of the key alone: it never fits."""

    retryable = False


def extra_headers(error: MeshError) -> list[tuple[bytes, bytes]]:
    """What the answer to ``error`` has beside ``Retry-After``, which counts whole seconds: words
    that OpenAI's clients look at first, and the challenge that belongs to a 401."""
    if isinstance(error, InvalidApiKey):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, OverLimit):
        return [(b"x-should-retry", b"false")]
    if isinstance(error, RateLimited | OverBudget) and error.retry_after_s is not None:
        return [(b"retry-after-ms", b"%d" % math.ceil(error.retry_after_s * 1000))]
    return []
