from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import SchemaError
from schemas.headers import MSG_ID, WorkHeaders

HEADERS = WorkHeaders(
    schema="prefill-task/1", request_id="request-1", epoch=2, deadline_unix_ms=1_790_000_000_000
)


@given(
    st.builds(
        WorkHeaders,
        schema=st.just("decode-task/1"),
        request_id=st.just("request-1"),
        epoch=st.integers(0, 10**6),
        deadline_unix_ms=st.integers(0, 10**15),
        attempt=st.integers(1, 100),
        traceparent=st.sampled_from(["", "00-ab-cd-01"]),
        object_name=st.sampled_from(["", "a1b2"]),
    )
)
def test_headers_round_trip(headers: WorkHeaders) -> None:
    """All that a stage must know before it decodes travels as text."""
    wire = headers.to_dict()
    assert all(isinstance(value, str) and value for value in wire.values())
    assert WorkHeaders.from_dict(wire) == headers


def test_names_on_the_wire() -> None:
    """Clients in other languages write these names."""
    wire = HEADERS.to_dict("id-1")
    assert wire == {
        "Mesh-Schema": "prefill-task/1",
        "Mesh-Request": "request-1",
        "Mesh-Epoch": "2",
        "Mesh-Deadline": "1790000000000",
        "Nats-Msg-Id": "id-1",
    }
    assert WorkHeaders.from_dict(wire | {"Other": "ignored"}) == HEADERS
    assert MSG_ID not in HEADERS.to_dict()


@pytest.mark.parametrize("name", ["Mesh-Schema", "Mesh-Request", "Mesh-Epoch", "Mesh-Deadline"])
def test_a_missing_header_is_named(name: str) -> None:
    """The four that every stage needs."""
    wire = HEADERS.to_dict()
    del wire[name]
    with pytest.raises(SchemaError) as caught:
        WorkHeaders.from_dict(wire)
    assert caught.value.param == name


def test_no_headers_at_all() -> None:
    """A bare message is refused like any other without them."""
    for none in (None, {}):
        with pytest.raises(SchemaError):
            WorkHeaders.from_dict(none)


@pytest.mark.parametrize("name", ["Mesh-Epoch", "Mesh-Deadline", "Mesh-Attempt"])
@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "0x10", " 1", "1_0", "\u0661", "9" * 19])
def test_words_that_are_no_number_are_refused(name: str, text: str) -> None:
    """Only plain decimal digits, of a bounded number, are a number."""
    with pytest.raises(SchemaError) as caught:
        WorkHeaders.from_dict(HEADERS.to_dict() | {name: text})
    assert caught.value.param == name
