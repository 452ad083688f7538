"""What admission receives, and what it writes once it has decided.

``InferenceRequest`` is the public way in: bridges, ``pipeline/client.py`` and any NATS client
publish it. ``RequestRecord`` is the admitted request; every later stage works from it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from schemas.codec import Message

MAX_READER_NOTE_BYTES = 4096


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must be: any JSON object, or JSON that a schema allows.

    An answer that ends with "stop", and not at a stop string or stop id, keeps to it; one that
    ends with "length" is the beginning of one that does.
    """

    kind: Literal["json_object", "json_schema"]
    json_schema: str = ""  # JSON text; properties come in the answer in the order they have here


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. Ranges are checked by admission, which names the field.

    Order of application: logit bias, penalties, what is not allowed (``response_format``, ends
    before ``min_tokens``), temperature, top-k, top-p, min-p. Logprobs are those before temperature,
    after all that stands in front of it; those of the prompt are the model's own, before all this.
    """

    # None: as many as the context has room for. 0, with prompt_logprobs: one is generated, and
    # neither shown nor counted.
    max_tokens: int | None = None
    min_tokens: int = 0  # before that neither eos nor a stop ends the answer
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # admission always sets one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: the chosen token and the k most likely
    # None: none; k: each prompt token's, but the first's, and those of the k most likely there
    prompt_logprobs: int | None = None
    n: int = 1
    response_format: ResponseFormat | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of a conversation; ``content`` is text, or OpenAI's list of text parts."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The times that a request should be served in, in milliseconds; 0: none is named.

    A request that can't be served so is not begun: what becomes of it says its model's policy.
    ``name`` is a class of that policy, whose times are meant where none is given here.
    """

    ttft_ms: float = 0.0  # from admission to the first token
    tbt_ms: float = 0.0  # between tokens
    name: str = ""


class InferenceRequest(Message, frozen=True, kw_only=True, tag="inference-request/1"):
    """A request as its publisher makes it. Exactly one of ``messages`` and ``prompt`` is set."""

    request_id: str  # the publisher's: 128 random bits, as text
    model: str
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | tuple[int, ...] | None = None  # text, or token ids
    sampling: SamplingParams = SamplingParams()
    reader: str | None = None  # None: "client.<request_id>"
    deadline_unix_ms: int | None = None
    priority: int = 0
    tenant: str = ""
    label: str = ""  # the client's own id: logged, never trusted to be unique
    cache_salt: str = ""
    echo: bool = False  # completions: the prompt's text is given back in front
    reader_note: bytes = b""  # the publisher's own, at most 4 KiB; the record gives it back
    slo: Slo = Slo()


class RequestRecord(Message, frozen=True, kw_only=True, tag="request-record/1"):
    """The admitted request, at ``mesh.v1.request.<id>``, written once."""

    request_id: str
    model: str
    revision: str
    served: str  # the subject token <model@rev>
    prompt_ids: bytes  # packed little-endian uint32
    sampling: SamplingParams  # seed and max_tokens set
    reader: str
    admitted_unix_ms: int
    deadline_unix_ms: int
    tenant: str = ""
    priority: int = 0
    label: str = ""
    cache_salt: str = ""
    cost: float = 0.0
    reader_note: bytes = b""  # as in the request; no stage looks into it
    slo: Slo = Slo()  # its own, else its class's; 0 where neither names one
    # Its reader was told by a direct answer, and finds no Accepted in the stream: this record says
    # all that one would.
    is_direct: bool = False


FinishReason = Literal["stop", "length"]
