"""Times that a request asks for by header, and what an answer says when it was cut or moved.

In    x-slo-ttft-ms, x-slo-tbt-ms          milliseconds, over 0
      x-slo-class                          a class of the model's policy
Out   x-mesh-asked-model                   another model answers: the one that was asked for
      x-mesh-clamped-max-tokens            fewer tokens than asked for: how many, per choice
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pipeline.policy import MAX_SLO_MS
from schemas.errors import InvalidRequest
from schemas.requests import Slo
from schemas.tokens import Accepted

TTFT, TBT, CLASS = b"x-slo-ttft-ms", b"x-slo-tbt-ms", b"x-slo-class"
ASKED_MODEL, CLAMPED = b"x-mesh-asked-model", b"x-mesh-clamped-max-tokens"
_HEADER_OF = {"slo.ttft_ms": TTFT, "slo.tbt_ms": TBT, "slo.name": CLASS}
_NUMBER = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?\Z")
_CLASS = re.compile(rb"[A-Za-z0-9_-]{1,40}\Z")

_NONE = Slo()

Header = tuple[bytes, bytes]


def asked_slo(headers: Mapping[bytes, bytes]) -> Slo:
    """What the headers ask for.

    Raises:
        InvalidRequest: names the header that can't be read.
    """
    if not (TTFT in headers or TBT in headers or CLASS in headers):
        return _NONE
    name = headers.get(CLASS, b"")
    if name and not _CLASS.match(name):
        raise _wrong(CLASS, "is no name of a class")
    return Slo(ttft_ms=_ms(headers, TTFT), tbt_ms=_ms(headers, TBT), name=name.decode())


def _ms(headers: Mapping[bytes, bytes], name: bytes) -> float:
    given = headers.get(name)
    if given is None:
        return 0.0
    if not _NUMBER.match(given) or not 0 < float(given) <= MAX_SLO_MS:
        raise _wrong(name, f"is no number of milliseconds, over 0 and up to {MAX_SLO_MS:g}")
    return float(given)


def _wrong(name: bytes, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name.decode()} {reason}", param=name.decode())


def naming_header(error: InvalidRequest) -> InvalidRequest:
    """``error`` of admission, which knows a request's fields, as one that names the header."""
    header = _HEADER_OF.get(error.param or "")
    return error if header is None else type(error)(error.message, param=header.decode())


def degraded_headers(accepted: Sequence[Accepted]) -> list[Header]:
    """What the answer says of a request that did not get what it asked for; of several prompts
    the worst."""
    headers: list[Header] = []
    moved = [one.asked_model for one in accepted if one.asked_model]
    if moved:
        headers.append((ASKED_MODEL, _printable(moved[0])))
    cut = [one.max_tokens for one in accepted if one.asked_max_tokens]
    if cut:
        headers.append((CLAMPED, b"%d" % min(cut)))
    return headers


def _printable(name: str) -> bytes:
    """A model's name as a header can carry it."""
    return re.sub(r"[^\x20-\x7e]", "?", name).encode()
