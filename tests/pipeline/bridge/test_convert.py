"""OpenAI's bodies to requests: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bridge.checks import BODY_RANGES
from pipeline.bridge.convert import (
    MAX_CHOICES,
    Arrival,
    chat_requests,
    completion_requests,
    parse,
)
from schemas.errors import InvalidRequest
from schemas.openai import ChatBody, CompletionBody
from schemas.requests import InferenceRequest, ResponseFormat, SamplingParams
from tests.pipeline.bridge.fake import chat, completion, patient

ARRIVAL = Arrival(deadline_unix_ms=123, label="mine")


def from_chat(**more: object) -> InferenceRequest:
    body = parse(msgspec.json.encode(chat(**more)), ChatBody)
    (request,) = chat_requests(body, ARRIVAL)
    return request


def from_completion(**more: object) -> list[InferenceRequest]:
    body = parse(msgspec.json.encode(completion(**more)), CompletionBody)
    return completion_requests(body, ARRIVAL)


def with_schema(**named: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def refusal(convert: Any, **more: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        convert(**more)
    return caught.value


def test_a_bare_chat_gets_openais_defaults() -> None:
    """What a client leaves out is OpenAI's default; the id is ours, the label the client's."""
    request = from_chat()
    assert request.sampling == SamplingParams()
    assert request.messages is not None
    assert [(m.role, m.content) for m in request.messages] == [("user", "Hi")]
    assert (request.deadline_unix_ms, request.label, request.reader) == (123, "mine", None)
    assert len(bytes.fromhex(request.request_id)) == 16


def test_request_ids_never_repeat() -> None:
    """Each request gets its own 128 random bits, also two of the same client label."""
    ids = {from_chat().request_id for _ in range(100)}
    assert len(ids) == 100


def test_all_sampling_fields_arrive() -> None:
    """Every field that the mesh serves reaches the request unchanged."""
    given_fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "repetition_penalty": 1.1, "min_tokens": 3, "seed": -5,
        "ignore_eos": True, "n": 2,
    }  # fmt: skip
    request = from_chat(
        **given_fields,
        max_completion_tokens=9,
        max_tokens=11,
        stop=["a", "b"],
        stop_token_ids=[3],
        logit_bias={"17": -100, "18": 1.5},
        logprobs=True,
        top_logprobs=4,
        priority=-3,
        cache_salt="s",
    )
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in given_fields} == given_fields
    assert (sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (9, ("a", "b"), (3,))
    assert sampling.logit_bias == {17: -100.0, 18: 1.5}
    assert (sampling.logprobs, request.priority, request.cache_salt) == (4, -3, "s")


def test_null_is_the_same_as_left_out() -> None:
    """Clients send null for what they don't set: it never changes anything."""
    fields = {
        name: None
        for kind in (ChatBody, CompletionBody)
        for name in kind.__struct_fields__
        if name not in ("model", "messages", "prompt")
    }
    assert from_chat(**fields).sampling == from_chat().sampling
    assert from_completion(**fields)[0].sampling == from_completion()[0].sampling


def test_unknown_fields_are_ignored() -> None:
    """A field that we don't know does no harm, whatever it holds."""
    assert from_chat(metadata={"a": [1]}, store=False, x=None).sampling == SamplingParams()


def test_completions_default_to_16_tokens() -> None:
    """OpenAI's completions stop after 16 tokens unless told otherwise; chat does not."""
    assert from_completion()[0].sampling.max_tokens == 16
    assert from_completion(max_tokens=3)[0].sampling.max_tokens == 3
    assert from_chat().sampling.max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_prompts_are_text_or_ids_or_batches(prompt: object, expected: list[object]) -> None:
    """Each of OpenAI's four forms becomes one request per prompt, in order."""
    requests = from_completion(prompt=prompt)
    assert [request.prompt for request in requests] == expected
    assert len({request.request_id for request in requests}) == len(expected)


def test_content_parts_stay_parts() -> None:
    """Text parts go on as they are: the chat template decides how to join them."""
    request = from_chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert request.messages is not None
    assert request.messages[0].content == [{"type": "text", "text": "Hi"}]


def test_a_developer_is_the_system_and_an_assistant_may_say_nothing() -> None:
    """Newer role names map to the ones that templates know; assistants' null content is empty."""
    request = from_chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "Hi", "name": "ann"},
        ]
    )
    assert request.messages is not None
    assert [(m.role, m.content, m.name) for m in request.messages] == [
        ("system", "Be brief.", None),
        ("assistant", "", None),
        ("user", "Hi", "ann"),
    ]


@pytest.mark.parametrize("name", [name for name in BODY_RANGES if name != "best_of"])
def test_each_range_is_enforced(name: str) -> None:
    """Just beyond either bound is refused, naming the field; the bounds themselves are not."""
    low, high = BODY_RANGES[name]
    low = 1 if name == "max_tokens" else low  # chat has no prompt's logprobs to ask for alone
    extra: dict[str, object] = {}
    if name == "top_logprobs":
        extra = {"logprobs": True}
    elif name == "min_tokens":
        extra = {"max_tokens": high}
    beyond = 0.001 if isinstance(low, float) else 1
    for value in (low - beyond, high + beyond):
        assert refusal(from_chat, **extra, **{name: value}).param == name
    for value in (low + (beyond if name == "top_p" else 0), high):
        from_chat(**extra, **{name: value})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
        ),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"model": "m" * 256}, "model"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"top_p": 0}, "top_p"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"\u00b2": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (with_schema(), "response_format.json_schema.name"),
        (with_schema(name="a b", schema={}), "response_format.json_schema.name"),
        (with_schema(name="a"), "response_format.json_schema.schema"),
        (with_schema(name="a", schema=True), "response_format.json_schema.schema"),
        (with_schema(name="a", schema={"x": "y" * 2**15}), "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_chat_cannot_do_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    """The caller's fault is a 400 that names the field, in words."""
    error = refusal(from_chat, **fields)
    assert (error.http_status, error.param) == (400, param)
    assert error.message


@pytest.mark.parametrize("convert", [from_chat, lambda **more: from_completion(**more)[0]])
def test_formats_of_the_answer(convert: Any) -> None:
    """OpenAI's three; a schema travels as text, its properties in the order they came in."""
    shape = {"type": "object", "properties": {"z": {}, "ä": {"enum": [2**70, 0.5]}, "a": {}}}
    named = {"name": "Shape-1", "schema": shape, "strict": True, "description": "of a thing"}
    made = convert(response_format={"type": "json_schema", "json_schema": named})
    wanted = made.sampling.response_format
    assert wanted.kind == "json_schema"
    assert json.loads(wanted.json_schema) == shape
    assert list(json.loads(wanted.json_schema)["properties"]) == ["z", "ä", "a"]
    made = convert(response_format={"type": "json_object"})
    assert made.sampling.response_format == ResponseFormat(kind="json_object")
    for nothing in (None, {"type": "text"}):
        assert convert(response_format=nothing).sampling.response_format is None


def test_a_missing_field_is_named() -> None:
    """A body without a required field says which."""
    assert refusal(lambda: parse(b'{"model":"m"}', ChatBody)).param == "messages"


def test_what_asks_for_nothing_special_is_taken() -> None:
    """Values that only say the default are no reason to refuse."""
    from_chat(
        tools=[], tool_choice="auto", functions=[], modalities=["text"], best_of=1,
        response_format={"type": "text"}, use_beam_search=False, top_logprobs=0, stop=[],
        logit_bias={},
    )  # fmt: skip
    from_chat(tools=[{"type": "function"}], tool_choice="none")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [2**32]]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a"] * (MAX_CHOICES + 1)}, "prompt"),
        ({"prompt": ["a"] * 5, "n": 64}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt_logprobs": 1, "echo": True}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ],
)
def test_what_completions_cannot_do_is_refused_by_name(
    fields: dict[str, object], param: str
) -> None:
    """As for chat."""
    error = refusal(from_completion, **fields)
    assert (error.http_status, error.param) == (400, param)


def test_echo_with_logprobs_asks_for_the_prompts() -> None:
    """As many alternatives for both; either alone asks for nothing of the prompt. Only so may there
    be no answer."""
    (both,) = from_completion(echo=True, logprobs=3)
    assert (both.echo, both.sampling.logprobs, both.sampling.prompt_logprobs) == (True, 3, 3)
    assert from_completion(echo=True)[0].sampling.prompt_logprobs is None
    assert from_completion(logprobs=3)[0].sampling.prompt_logprobs is None
    (off,) = from_completion(echo=True, logprobs=False)
    assert (off.sampling.logprobs, off.sampling.prompt_logprobs) == (None, None)
    (none,) = from_completion(echo=True, logprobs=0, max_tokens=0)
    assert (none.sampling.max_tokens, none.sampling.prompt_logprobs) == (0, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"nonsense", b"[]", b"null", b"\xff\xfe", b'{"model":"\xff"}',
        b'{"model":"m","messages":[],"x":' + b"[" * 100_000,
        b'{"model":"m","tools":' + b"[" * 100_000,
        b'{"model":"m","temperature":1e999}', b'{"model":"\\ud800","messages":[]}',
        b'{"model":"m","temperature":NaN}',
    ],
)  # fmt: skip
def test_broken_json_is_the_callers_fault(data: bytes) -> None:
    """Whatever bytes come, the error is an InvalidRequest."""
    assert refusal(lambda: parse(data, ChatBody)).http_status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@patient
@given(
    chat_fields=st.dictionaries(st.sampled_from(ChatBody.__struct_fields__), JSON),
    completion_fields=st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), JSON),
)
def test_any_value_in_any_field_converts_or_is_refused(
    chat_fields: dict[str, object], completion_fields: dict[str, object]
) -> None:
    """No value of any field raises anything but InvalidRequest, and what converts encodes."""
    for convert, fields in ((from_chat, chat_fields), (from_completion, completion_fields)):
        try:
            made = convert(**fields)
        except InvalidRequest:
            continue
        for request in made if isinstance(made, list) else [made]:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=InferenceRequest)
