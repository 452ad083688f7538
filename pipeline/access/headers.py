"""``x-ratelimit-*`` as OpenAI writes them, which LiteLLM, LangChain and others read."""

from __future__ import annotations

import math

from pipeline.access.bucket import Bucket

Header = tuple[bytes, bytes]

_MS_PER_HOUR = 3_600_000
_MS_PER_MINUTE = 60_000


def rate_headers(name: str, limit: int | None, bucket: Bucket, now_s: float) -> list[Header]:
    """The three headers of one limit at ``now_s``; none without a limit.

    Args:
        name: "requests" or "tokens".
        bucket: as it was at some time before; it is left alone.
    """
    if limit is None:
        return []
    now = Bucket(bucket.level, bucket.at_s)
    now.drain(limit, now_s)
    ending = name.encode()
    return [
        (b"x-ratelimit-limit-" + ending, b"%d" % limit),
        (b"x-ratelimit-remaining-" + ending, b"%d" % now.remaining(limit)),
        (b"x-ratelimit-reset-" + ending, duration(now.reset_s(limit)).encode()),
    ]


def duration(seconds: float) -> str:
    """A time as Go prints it, rounded up to milliseconds: ``0s``, ``17ms``, ``1.5s``, ``6m0s``."""
    ms = math.ceil(seconds * 1000)
    if 0 < ms < 1000:
        return f"{ms}ms"
    hours, ms = divmod(ms, _MS_PER_HOUR)
    minutes, ms = divmod(ms, _MS_PER_MINUTE)
    text = f"{ms / 1000:g}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
