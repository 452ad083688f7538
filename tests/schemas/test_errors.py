from __future__ import annotations

import pytest

import infra.bus.errors
from schemas.codec import decode, encode
from schemas.errors import BY_CODE, ErrorInfo, InvalidRequest, MeshError, from_info
from schemas.tokens import StreamError


def tree(root: type[MeshError]) -> list[type[MeshError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]


OURS = [kind for kind in tree(MeshError) if kind.__module__ == "schemas.errors"]


def test_codes_are_unique() -> None:
    """A code names one class, among those that travel and those that the bus adds. A class
    without a code of its own is its parent for everybody who does not know it."""
    modules = ("schemas.errors", infra.bus.errors.__name__)
    kinds = [kind for kind in tree(MeshError) if kind.__module__ in modules]
    codes = [kind.code for kind in kinds if "code" in vars(kind)]
    assert sorted(codes) == sorted(set(codes))
    assert set(BY_CODE) == {kind.code for kind in OURS}


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_on_the_other_side(kind: type[MeshError]) -> None:
    """Class, message, parameter and pause survive the way through a stream."""
    error = kind("what is wrong", param="top_p", retry_after_s=2.5)
    sent = StreamError(request_id="request-1", epoch=0, error=error.info)
    found = from_info(decode(encode(sent), StreamError).error)
    assert (type(found), found.message, found.param) == (kind, "what is wrong", "top_p")
    assert found.retry_after_s == 2.5
    assert str(found) == "what is wrong"


def test_a_newer_code_is_an_error_all_the_same() -> None:
    """A code that we don't know is a failure of the server's with its message."""
    found = from_info(ErrorInfo(code="from_the_future", message="hm"))
    assert (type(found), found.message, found.http_status) == (MeshError, "hm", 500)


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_statuses_say_whose_fault_it_is(kind: type[MeshError]) -> None:
    """4xx for the caller's faults and limits; only what may go better later is retryable."""
    if issubclass(kind, InvalidRequest):
        assert kind.http_status in (400, 413)
        assert not kind.retryable
    if kind.retryable:
        assert kind.http_status in (429, 503)
