from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import decode, decode_json, encode, is_json, pack_ids, unpack_ids
from schemas.errors import SchemaError
from schemas.requests import InferenceRequest
from schemas.tokens import decode_stream_message

MINIMAL = b'{"request_id": "request-1", "model": "m"%s}'


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_round_trip(ids: list[int]) -> None:
    """Four little-endian bytes per id, whatever machine reads them."""
    packed = pack_ids(ids)
    assert packed == b"".join(token_id.to_bytes(4, "little") for token_id in ids)
    assert unpack_ids(packed) == ids
    assert pack_ids(tuple(ids)) == packed


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_beyond_32_bits_are_refused(token_id: int) -> None:
    """An id is never cut to fit."""
    with pytest.raises(SchemaError) as caught:
        pack_ids([1, token_id])
    assert caught.value.param == "ids"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_odd_bytes_are_no_ids(size: int) -> None:
    """Half an id is refused, not dropped."""
    with pytest.raises(SchemaError) as caught:
        unpack_ids(bytes(size))
    assert caught.value.param == "ids"


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_schema_error(data: bytes) -> None:
    """Nothing that arrives makes the codec raise anything else."""
    for read in (
        decode_stream_message,
        lambda bad: decode(bad, InferenceRequest),
        lambda bad: decode_json(bad, InferenceRequest),
    ):
        with contextlib.suppress(SchemaError):
            read(data)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b', "sampling": {"top_p": "x"}', "$.sampling.top_p"),
        (b', "sampling": {"logit_bias": {"x": 1}}', "$.sampling.logit_bias"),
        (b', "sampling": {"stop": ["a", 1]}', "$.sampling.stop[1]"),
        (b', "messages": [{"content": "no role"}]', "$.messages[0].role"),
        (b', "sampling": {"temperature": 1e999}', "$.sampling.temperature"),
    ],
)
def test_the_path_leads_into_the_message(body: bytes, path: str) -> None:
    """The error names the place, list positions and missing fields included."""
    with pytest.raises(SchemaError) as caught:
        decode_json(MINIMAL % body, InferenceRequest)
    assert caught.value.param == path


def test_json_and_messagepack_give_the_same() -> None:
    """A body typed by hand is the same request; without a tag it is taken for what is expected."""
    typed = decode_json(MINIMAL % b', "prompt": "Hi"', InferenceRequest)
    assert typed == InferenceRequest(request_id="request-1", model="m", prompt="Hi")
    assert decode(encode(typed), InferenceRequest) == typed
    assert decode(msgpack.packb({"request_id": "request-1", "model": "m"}), InferenceRequest)


@pytest.mark.parametrize("wrong", [{"priority": 2**64}, {"label": "\ud800"}])
def test_what_the_wire_can_not_hold_is_refused(wrong: dict[str, object]) -> None:
    """Integers beyond 64 bits and half characters never leave."""
    with pytest.raises(SchemaError):
        encode(InferenceRequest(request_id="request-1", model="m", **wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [b"[" * 100_000, b'{"a":' * 100_000, b"\x91" * 100_000])
def test_deep_nesting_is_refused(bad: bytes) -> None:
    """A body that nests for ever costs an error, not the process."""
    with pytest.raises(SchemaError):
        decode_json(bad, InferenceRequest)
    with pytest.raises(SchemaError):
        decode(bad, InferenceRequest)


@pytest.mark.parametrize(
    ("data", "expected"), [(b' \n{"a": 1}', True), (b"\x81\xa1a\x01", False), (b"", False)]
)
def test_json_is_known_by_its_brace(data: bytes, expected: bool) -> None:
    """No MessagePack map begins with a brace: 0x7b is the number 123."""
    assert is_json(data) is expected
