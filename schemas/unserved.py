"""Fields of OpenAI's and vLLM's requests that would change the answer, and are not served.

An unknown field is ignored, for most only label or tune. Who sends one of these would get another
answer than was asked for, so they are known, and refused unless they ask for nothing.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a client sends."""


class UnservedFields(Body, frozen=True, kw_only=True):
    """Base of the bodies that generate. Of any type: being there is what is wrong with them."""

    add_generation_prompt: Any = None  # the default is true
    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    documents: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    include_stop_str_in_output: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    skip_special_tokens: Any = None  # the default is true
    structured_outputs: Any = None
    suffix: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


_all_of = attrgetter(*UnservedFields.__struct_fields__)
DEFAULT_TRUE = frozenset({"skip_special_tokens", "add_generation_prompt"})

_FORMAT = "is not served: use response_format"
REASONS = {
    "suffix": "is not served: no insertion",
    "audio": "is not served: only text is",
    "prompt_logprobs": "is not served: use echo and logprobs in completions",
    "guided_choice": _FORMAT,
    "guided_grammar": _FORMAT,
    "guided_json": _FORMAT,
    "guided_regex": _FORMAT,
    "structured_outputs": _FORMAT,
    "chat_template": "is not served: the model's own is used",
}
"""What is said beside the name, for fields where there is more to say than that."""


def unserved(body: UnservedFields) -> tuple[str, str] | None:
    """The first field of ``body`` that asks for what is not served, and a sentence about it.

    Null, false, zero and empty ask for nothing, but for those whose default is true.
    """
    values = _all_of(body)
    if values.count(None) == len(values):
        return None
    for name, value in zip(UnservedFields.__struct_fields__, values, strict=True):
        asks = value is not None and not value if name in DEFAULT_TRUE else bool(value)
        if asks:
            return name, f"{name} {REASONS.get(name, 'is not served')}"
    return None
