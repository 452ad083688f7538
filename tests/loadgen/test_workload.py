from itertools import islice

import msgspec
import pytest

from loadgen.workload import Workload
from schemas.codec import decode, encode
from schemas.requests import InferenceRequest


def make(**changes: object) -> Workload:
    return msgspec.convert(
        {"model": "m", "input_len": 32, "output_len": 5, "vocab_low": 10, "vocab_high": 20}
        | changes,
        Workload,
    )


def test_prompts_have_the_exact_length_and_stay_in_the_vocabulary() -> None:
    """Token-id prompts are exactly ``input_len`` ids out of the half-open range."""
    prompts = [request.prompt for request in islice(make().requests(), 50)]
    assert {len(prompt) for prompt in prompts} == {32}
    assert {token for prompt in prompts for token in prompt} == set(range(10, 20))


def test_words_are_as_many_as_tokens_were_asked_for() -> None:
    """A prompt of words has ``input_len`` words."""
    prompt = make(kind="words").request(0).prompt
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 32


def test_a_prompt_depends_on_seed_and_number_alone() -> None:
    """Runs with one seed send the same prompts; other seeds, numbers and warm-ups differ."""
    wide = make(vocab_high=1_000_000)
    request = wide.request(3)
    assert request.prompt == list(islice(wide.requests(), 4))[3].prompt
    others = [make(vocab_high=1_000_000, seed=1).request(3), wide.request(4), wide.request(-3)]
    assert request.prompt not in [other.prompt for other in others]
    assert request.seed == wide.request(3).seed


def test_request_ids_are_new_in_every_run() -> None:
    """A mesh answers a request id once, so a repeated run must not repeat ids."""
    assert make().request(0).request_id != make().request(0).request_id


def test_warm_up_prompts_are_never_measured_ones() -> None:
    """What the warm-up leaves in a prefix cache helps no measured request."""
    wide = make(vocab_high=1_000_000)
    measured = {request.prompt for request in islice(wide.requests(), 20)}
    assert measured.isdisjoint(request.prompt for request in wide.warmup(20))


def test_bus_message_asks_for_exactly_the_output_length() -> None:
    """The message survives the wire and fixes the answer's length, greedy."""
    request = make().request(0)
    message = decode(encode(request.bus_message(123)), InferenceRequest)
    assert message.prompt == request.prompt
    assert message.messages is None
    sampling = message.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (5, 5, True)
    assert sampling.temperature == 0
    assert message.deadline_unix_ms == 123


@pytest.mark.parametrize("is_chat", [False, True])
def test_http_body_is_a_streamed_request_with_usage(is_chat: bool) -> None:
    """Chat gets one user turn, completions the token ids; both ask for usage."""
    kind = "words" if is_chat else "ids"
    request = make(kind=kind, is_chat=is_chat).request(0)
    body = msgspec.json.decode(request.http_body())
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (5, 5, True)
    if is_chat:
        assert body["messages"] == [{"role": "user", "content": request.prompt}]
        message = request.bus_message(1)
        assert message.prompt is None
        assert message.messages is not None
        assert message.messages[0].content == request.prompt
    else:
        assert body["prompt"] == list(request.prompt)
