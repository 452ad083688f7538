"""What would change the answer is refused by name; what only labels or tunes is let pass."""

from __future__ import annotations

import pytest

from schemas.unserved import DEFAULT_TRUE, REASONS, UnservedFields
from tests.pipeline.bridge.test_convert import from_chat, from_completion, refusal

FIELDS = UnservedFields.__struct_fields__


@pytest.mark.parametrize("name", FIELDS)
def test_each_is_refused_by_name_on_both_endpoints(name: str) -> None:
    """A client that asks for it is told, not given another answer."""
    value = False if name in DEFAULT_TRUE else {"x": 1}
    for convert in (from_chat, from_completion):
        error = refusal(convert, **{name: value})
        assert (error.http_status, error.param) == (400, name)
        assert error.message.startswith(name)


@pytest.mark.parametrize("name", FIELDS)
def test_each_may_ask_for_nothing(name: str) -> None:
    """Clients that write all their defaults out are served."""
    for value in [True, None] if name in DEFAULT_TRUE else [None, False, 0, "", [], {}]:
        assert from_chat(**{name: value}).sampling == from_chat().sampling
        assert from_completion(**{name: value})[0].sampling == from_completion()[0].sampling


def test_reasons_are_of_fields() -> None:
    """No reason is left behind when a field comes to be served."""
    assert set(REASONS) <= set(FIELDS)


def test_echo_is_for_completions() -> None:
    """vLLM's echo of a conversation is not served; that of a prompt is."""
    assert refusal(from_chat, echo=True).param == "echo"
    from_chat(echo=False)
    assert from_completion(echo=True)[0].echo


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"run": "7"}},
        {"service_tier": "auto", "user": "ann", "safety_identifier": "x"},
        {"parallel_tool_calls": True, "tools": [], "tool_choice": "none"},
        {"reasoning_effort": "low", "verbosity": "low"},
        {"prediction": {"type": "content", "content": "Hi"}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"tool_choice": "auto", "functions": None, "function_call": "none"},
        {"modalities": ["text"], "response_format": {"type": "text"}},
        {"stream": False, "stream_options": None},
        {"detokenize": True, "spaces_between_special_tokens": True, "length_penalty": 1.0},
        {"request_id": "mine", "vllm_xargs": {}, "mm_processor_kwargs": None},
    ],
)
def test_what_clients_send_along_is_let_pass(fields: dict[str, object]) -> None:
    """Labels, hints and defaults of OpenAI's, vLLM's and their clients' change nothing."""
    assert from_chat(**fields).sampling == from_chat().sampling
    assert from_completion(**fields)[0].sampling == from_completion()[0].sampling
