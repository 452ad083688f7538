"""Events: their bytes, their order, and that the short way says what the long way says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bridge.answers import Gathered, Identity
from pipeline.bridge.chunks import ChatEvents, CompletionEvents
from pipeline.bridge.logprobs import completion_logprobs, echo_logprobs
from pipeline.bridge.sse import Events, StreamForm
from schemas.errors import EngineFailed, InvalidRequest
from schemas.tokens import TokenDelta, TokenLogprob, TopLogprob, Usage
from tests.pipeline.bridge.fake import patient

ABOUT = Identity(id="chatcmpl-1", created=7, model="m", fingerprint="r1")
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
KINDS: tuple[type[Events], ...] = (ChatEvents, CompletionEvents)


def delta(
    text: str, reason: str | None = None, index: int = 0, logprobs: Sequence[TokenLogprob] = ()
) -> TokenDelta:
    return TokenDelta(
        request_id="r", epoch=1, number=0, ids=(1,), text=text, index=index, finish_reason=reason,
        logprobs=tuple(logprobs) or None,
    )  # fmt: skip


def make(
    kind: type[Events], form: StreamForm | None = None, echoes: Sequence[str] = ("",)
) -> Events:
    return kind(ABOUT, form or StreamForm(), prompt_tokens=5, echoes=echoes)


def told(events: Events, choice: int, one: TokenDelta) -> bytes:
    """The events of one delta."""
    return events.deltas(choice - one.index, [one])


def payloads(data: bytes) -> list[dict[str, object]]:
    """The JSON of all events but ``[DONE]``."""
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_chat_transcript() -> None:
    """The exact bytes of a chat stream: role with the first token, text, one reason, usage,
    [DONE]."""
    events = make(ChatEvents, StreamForm(include_usage=True))
    data = told(events, 0, delta("Hé\n")) + told(events, 0, delta("y", "stop"))
    data += events.end(["stop"], USAGE)
    start = (
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m",'
        '"system_fingerprint":"r1","choices":['
    )
    expected = [
        start + '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        '"finish_reason":null}],"usage":null}',
        start + '{"index":0,"delta":{"content":"Hé\\n"},"logprobs":null,'
        '"finish_reason":null}],"usage":null}',
        start + '{"index":0,"delta":{"content":"y"},"logprobs":null,'
        '"finish_reason":null}],"usage":null}',
        start + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}',
        start + '],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":4}}}',
        "data: [DONE]",
        "",
    ]
    assert data.decode() == "\n\n".join(expected)


def test_completions_transcript() -> None:
    """The exact bytes of a completions stream with echo: the prompt first; no usage unasked."""
    events = make(CompletionEvents, echoes=["Once"])
    data = told(events, 0, delta(" upon")) + events.end(["length"], USAGE)
    start = (
        'data: {"id":"chatcmpl-1","object":"text_completion","created":7,"model":"m",'
        '"system_fingerprint":"r1","choices":[{"index":0,"text":'
    )
    expected = [
        start + '"Once","logprobs":null,"finish_reason":null}]}',
        start + '" upon","logprobs":null,"finish_reason":null}]}',
        start + '"","logprobs":null,"finish_reason":"length"}]}',
        "data: [DONE]",
        "",
    ]
    assert data.decode() == "\n\n".join(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_event_ids_count_events(kind: type[Events]) -> None:
    """Asked for, each event but [DONE] has its running number in front, from 1."""
    events = make(kind, StreamForm(event_ids=True, include_usage=True))
    data = told(events, 0, delta("a")) + told(events, 0, delta("b")) + events.end(["stop"], USAGE)
    blocks = data.decode().split("\n\n")[:-2]
    assert [block.split("\n")[0] for block in blocks] == [
        f"id: {i + 1}" for i in range(len(blocks))
    ]
    assert all(block.split("\n")[1].startswith("data: {") for block in blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_delta_makes_no_event(kind: type[Events]) -> None:
    """Text that is held back (half a character, maybe a stop string) sends nothing."""
    events = make(kind)
    told(events, 0, delta("a"))
    assert told(events, 0, delta("")) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_follows_a_finish_reason(kind: type[Events]) -> None:
    """A choice has one finish reason, and it is its last word."""
    events = make(kind)
    told(events, 0, delta("a", "length"))
    assert told(events, 0, delta("b")) == b""
    assert events.end(["length"], USAGE) == b"data: [DONE]\n\n"


def test_a_choice_without_tokens_still_opens_and_closes() -> None:
    """The end gives each choice that had no token its role and its finish reason."""
    chunks = payloads(make(ChatEvents).end(["stop"], USAGE))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c["delta"] for c in choices] == [{"role": "assistant", "content": ""}, {}]
    assert [c["finish_reason"] for c in choices] == [None, "stop"]


def test_a_failure_is_an_error_event_without_done() -> None:
    """A stream that fails says so and does not look complete; it is no event of the stream, so it
    has no number."""
    events = make(ChatEvents, StreamForm(event_ids=True))
    assert events.failure(EngineFailed("it broke")) == (
        b'data: {"error":{"message":"it broke","type":"server_error","param":null,'
        b'"code":"engine_failed"}}\n\n'
    )


def test_usage_grows_when_asked_for() -> None:
    """continuous_usage_stats: every chunk carries the usage so far, the last the exact one."""
    form = StreamForm(include_usage=True, continuous_usage=True)
    events = make(ChatEvents, form)
    data = told(events, 0, delta("a")) + told(events, 0, delta("")) + told(events, 0, delta("b"))
    data += events.end(["stop"], USAGE)
    counts = [chunk["usage"]["completion_tokens"] for chunk in payloads(data)]
    assert counts == [0, 1, 3, 3, 2]


def some_logprob(text: str, value: float = -0.5) -> TokenLogprob:
    top = TopLogprob(token_id=2, token="x\ufffd", logprob=float("-inf"))
    return TokenLogprob(token_id=1, token=text, logprob=value, top=(top,))


def test_logprobs_in_chat_form() -> None:
    """Bytes are null where a token is part of a character; minus infinity is a number."""
    events = make(ChatEvents)
    (_, chunk) = payloads(told(events, 0, delta("é", logprobs=[some_logprob("é")])))
    assert chunk["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [{"token": "x\ufffd", "logprob": -9999.0, "bytes": None}],
            }
        ],
        "refusal": None,
    }


def test_logprobs_in_completions_form() -> None:
    """Offsets run on over chunks and start after the echo; the chosen token is in its top."""
    events = make(CompletionEvents, echoes=["Once"])
    data = told(events, 0, delta("ab", logprobs=[some_logprob("ab")]))
    data += told(events, 0, delta("", logprobs=[some_logprob("\ufffd")]))
    data += told(events, 0, delta("é", logprobs=[some_logprob("\ufffd")]))
    found = [chunk["choices"][0]["logprobs"] for chunk in payloads(data)[1:]]
    assert [one["text_offset"] for one in found] == [[4], [6], [7]]
    assert found[0] == {
        "tokens": ["ab"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"x\ufffd": -9999.0, "ab": -0.5}],
        "text_offset": [4],
    }


def test_alternatives_of_one_text_are_told_apart() -> None:
    """Parts of characters look alike; whoever asks whether the token was the likeliest must not
    be told so because another hides behind it."""
    tops = tuple(
        TopLogprob(token_id=token_id, token="\ufffd", logprob=-0.1 * token_id)
        for token_id in (1, 2, 3)
    )
    one = TokenLogprob(token_id=2, token="\ufffd", logprob=-0.2, top=tops)
    (found,) = completion_logprobs([one]).top_logprobs
    assert found == {"token_id:1": -0.1, "\ufffd": -0.2, "token_id:3": pytest.approx(-0.3)}
    unlikely = TokenLogprob(token_id=9, token="\ufffd", logprob=-5.0, top=tops[:1])
    assert completion_logprobs([unlikely]).top_logprobs == [{"token_id:1": -0.1, "\ufffd": -5.0}]


@pytest.mark.parametrize(
    ("tokens", "echo", "places"),
    [
        (["On", "ce", " upon"], "Once upon", [0, 2, 4]),
        (["<s>", "On", "ce"], "Once", [0, 0, 2]),  # a special token does not show
        ([" On", "ce"], "Once", [0, 2]),  # a decoder that strips the first blank
        (["<s>", " On", "ce", " o"], "Once o", [0, 0, 2, 4]),
        (["a", "\ufffd", "\ufffd", "b", "c"], "a€bc", [0, 1, 1, 2, 3]),  # parts of a character
        (["a", "", "a"], "aa", [0, 1, 1]),
        (["<s>"], "", [0]),
    ],
)
def test_a_prompts_tokens_are_placed_in_its_text(
    tokens: list[str], echo: str, places: list[int]
) -> None:
    """Offsets are those of the text that is shown, whatever tokens are called."""
    prompt = [some_logprob(token) for token in tokens]
    assert echo_logprobs(prompt, echo).text_offset == places


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
FORMS = st.builds(
    StreamForm, include_usage=st.booleans(), continuous_usage=st.booleans(),
    event_ids=st.booleans(),
)  # fmt: skip


@patient
@given(
    kind=st.sampled_from(KINDS),
    form=FORMS,
    words=st.lists(st.tuples(TEXTS, st.integers(0, 2), st.booleans()), max_size=12),
)
def test_a_stream_adds_up_to_the_whole_answer(
    kind: type[Events], form: StreamForm, words: list[tuple[str, int, bool]]
) -> None:
    """For any deltas of three choices: the texts of the stream join to those of the whole answer,
    each choice ends once, at its end, and usage comes once, at the very end, iff asked for."""
    events, gathered = make(kind, form, [""] * 3), Gathered([""] * 3)
    data = b""
    for text, index, with_logprobs in words:
        one = delta(text, index=index, logprobs=[some_logprob(text)] if with_logprobs else ())
        data += told(events, index, one)
        gathered.add(index, one)
    data += events.end(["stop"] * 3, USAGE)
    assert data.endswith(b"data: [DONE]\n\n")
    chunks = payloads(data)
    assert len(chunks) == events.num_events
    whole = gathered.completion(ABOUT, ["stop"] * 3, USAGE)
    for choice in range(3):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
        texts = [c["text"] if "text" in c else c["delta"].get("content", "") for c in mine]
        assert "".join(texts) == whole.choices[choice].text
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert [chunk for chunk in chunks if not chunk["choices"]] == chunks[
        len(chunks) - form.include_usage :
    ]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-1"}


@patient
@given(
    kind=st.sampled_from(KINDS),
    form=FORMS,
    words=st.lists(st.tuples(TEXTS, st.integers(0, 2), st.booleans()), max_size=12),
    after=st.integers(0, 40),
)
def test_what_is_left_out_is_exactly_what_the_client_has(
    kind: type[Events], form: StreamForm, words: list[tuple[str, int, bool]], after: int
) -> None:
    """For any stream and any number: the first events of a whole stream and those after them are
    the whole; a number that the stream has not is refused at its end."""
    form = StreamForm(
        include_usage=form.include_usage, continuous_usage=form.continuous_usage, event_ids=True
    )

    def write(after_event: int) -> bytes:
        events = kind(
            ABOUT, form, prompt_tokens=5, echoes=["", "Once", ""], after_event=after_event
        )
        data = b""
        for text, index, with_logprobs in words:
            logprobs = [some_logprob(text)] if with_logprobs else ()
            data += told(events, index, delta(text, index=index, logprobs=logprobs))
        return data + events.end(["stop"] * 3, USAGE)

    whole = write(0)
    parts = [part + b"\n\n" for part in whole.split(b"\n\n")[:-1]]
    if after >= len(parts):
        with pytest.raises(InvalidRequest):
            write(after)
    else:
        assert b"".join(parts[:after]) + write(after) == whole


@patient
@given(text=TEXTS)
def test_the_short_way_writes_what_the_long_way_writes(text: str) -> None:
    """An event made of constant parts has the same bytes as one that is encoded whole."""
    for kind, form in itertools.product(KINDS, (StreamForm(), StreamForm(event_ids=True))):
        short, long = make(kind, form), make(kind, form)
        told(short, 0, delta("first"))
        told(long, 0, delta("first"))
        whole = long._event(long._text(0, delta(text))) if text else b""
        assert told(short, 0, delta(text)) == whole


@patient
@given(
    kind=st.sampled_from(KINDS),
    form=FORMS,
    is_numbered=st.booleans(),
    words=st.lists(
        st.tuples(TEXTS, st.integers(0, 2), st.booleans(), st.sampled_from([None, None, "stop"])),
        max_size=12,
    ),
)
def test_deltas_that_come_together_are_told_as_one_by_one(
    kind: type[Events],
    form: StreamForm,
    is_numbered: bool,
    words: list[tuple[str, int, bool, str | None]],
) -> None:
    """For any deltas of a prompt's choices: same bytes, same count of events."""
    form = StreamForm(
        include_usage=form.include_usage,
        continuous_usage=form.continuous_usage,
        event_ids=is_numbered,
    )
    together, alone = make(kind, form, [""] * 4), make(kind, form, [""] * 4)
    deltas = [
        delta(text, reason, index, [some_logprob(text)] if with_logprobs else ())
        for text, index, with_logprobs, reason in words
    ]
    data = b"".join([told(alone, 1 + one.index, one) for one in deltas])
    assert together.deltas(1, deltas) == data
    assert together.num_events == alone.num_events


@patient
@given(
    kind=st.sampled_from(KINDS),
    form=FORMS,
    words=st.lists(TEXTS, min_size=1, max_size=6),
    reason=st.sampled_from([None, "stop"]),
    after=st.integers(0, 3),
)
def test_tokens_of_one_delta_are_told_as_one_by_one(
    kind: type[Events], form: StreamForm, words: list[str], reason: str | None, after: int
) -> None:
    """For any tokens that follow each other: whether they come as one delta or as several, first
    ones or later ones, events and their numbers are the same."""
    whole = TokenDelta(
        request_id="r", epoch=1, number=after, ids=tuple(range(len(words))), text="".join(words),
        sizes=tuple([len(word) for word in words[:-1]]), finish_reason=reason,
    )  # fmt: skip
    together, alone = make(kind, form), make(kind, form)
    before = [delta("x")] * after
    data = alone.deltas(0, before)
    for one in whole.split():
        data += told(alone, 0, one)
    assert together.deltas(0, before) + together.deltas(0, [whole]) == data
    assert together.num_events == alone.num_events


@given(kind=st.sampled_from(KINDS), form=FORMS, ids=st.lists(TEXTS, min_size=2, max_size=3))
def test_streams_of_one_shape_differ_in_their_ids_alone(
    kind: type[Events], form: StreamForm, ids: list[str]
) -> None:
    """What they have in common is built once; a stream of another second, model or revision gets
    nothing of it."""
    for name in ids:
        for about in (
            Identity(id=name, created=7, model="m", fingerprint="r1"),
            Identity(id=name, created=8, model="m", fingerprint="r1"),
            Identity(id=name, created=7, model="\x00text\x00", fingerprint="r2"),
        ):
            events = kind(about, form, prompt_tokens=5, echoes=["", ""])
            said = told(events, 1, delta("x", "length", index=1)) + events.end(["stop"] * 2, USAGE)
            for event in payloads(said):
                assert (event["id"], event["created"]) == (name, about.created)
                assert (event["model"], event["system_fingerprint"]) == (
                    about.model,
                    about.fingerprint,
                )
