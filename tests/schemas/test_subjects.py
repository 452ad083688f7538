from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import subjects
from schemas.errors import SchemaError

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
ids = st.from_regex(r"[A-Za-z0-9_-]{8,64}", fullmatch=True)
words = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
TOKEN = re.compile(r"[A-Za-z0-9_=-]+")

BAD_IDS = [
    "",
    "short",
    "a.b.c.d.e",
    "with space",
    "star*star*",
    "a>bcdefgh",
    "x" * 65,
    "line\nfeed",
]


@given(names)
def test_any_model_name_becomes_one_token_and_back(name: str) -> None:
    """Dots, slashes, wildcards, blanks and any language; never a second token or a wildcard."""
    token = subjects.encode_name(name)
    assert TOKEN.fullmatch(token)
    assert subjects.decode_name(token) == name


@given(names, names)
def test_two_names_never_meet(one: str, other: str) -> None:
    """Different names have different tokens."""
    assert (subjects.encode_name(one) == subjects.encode_name(other)) == (one == other)


@given(names, names)
def test_served_names_model_and_revision(model: str, revision: str) -> None:
    """``<model@rev>`` can be taken apart again, an @ in the name or not."""
    assert subjects.split_served(subjects.served(model, revision)) == (model, revision)


@pytest.mark.parametrize("name", ["", "x" * 513, "漢" * 57, "\ud800"])
def test_names_that_are_no_token_are_refused(name: str) -> None:
    """Empty, too long for a subject, or no text."""
    with pytest.raises(SchemaError) as caught:
        subjects.encode_name(name)
    assert caught.value.param == "model"


@pytest.mark.parametrize("token", ["", "=", "=4", "=zz", "=FF", "=2f", "=41", "a.b", "a=", "=-1"])
def test_tokens_that_we_never_write_are_refused(token: str) -> None:
    """One name, one token: other spellings are not read either."""
    with pytest.raises(SchemaError):
        subjects.decode_name(token)


def test_a_served_token_needs_its_revision() -> None:
    """A name alone does not say what is served."""
    with pytest.raises(SchemaError):
        subjects.split_served("tiny")


@given(names, names, words)
def test_work_subjects_can_be_taken_apart(model: str, revision: str, worker: str) -> None:
    """Stage, model and worker of every work subject are read back from it."""
    served = subjects.served(model, revision)
    assert subjects.split_work(subjects.prefill(served, worker)) == ("prefill", served, worker)
    assert subjects.split_work(subjects.decode(served)) == ("decode", served, subjects.ANY)
    assert subjects.split_work(subjects.kv_ready(served)) == ("kv-ready", served, None)
    admission = subjects.admission(model)
    assert subjects.split_work(admission) == ("admission", subjects.encode_name(model), None)


@given(words, words, ids)
def test_stream_subjects_live_and_stored(user: str, name: str, request_id: str) -> None:
    """The republished subject leads back to the stored one; both name reader and request."""
    reader = f"{user}.{name}"
    tokens, chain = subjects.token_stream(reader), subjects.chain(reader, request_id)
    for stored, expected in ((tokens, None), (chain, request_id)):
        live = subjects.live(stored)
        assert live.startswith("mesh.v1.live.token-stream.")
        assert subjects.stored(live) == stored == subjects.stored(stored)
        assert subjects.split_stream_subject(live) == (reader, expected)
        assert subjects.split_stream_subject(stored) == (reader, expected)
        assert stored.startswith(subjects.reader_filter(reader).removesuffix(">"))


@pytest.mark.parametrize("subject", ["mesh.v1.request.x", "mesh.v1.prefill.a.b.c", "", "a"])
def test_other_subjects_are_not_taken_apart(subject: str) -> None:
    """What is neither work nor a stream is an error, not a guess."""
    with pytest.raises(SchemaError):
        subjects.split_work(subject)
    with pytest.raises(SchemaError):
        subjects.split_stream_subject(subject)


@pytest.mark.parametrize("bad", BAD_IDS)
def test_request_ids_that_can_not_stand_in_a_subject(bad: str) -> None:
    """No id reaches into another subject."""
    for make in (
        subjects.check_request_id,
        subjects.request_record,
        subjects.default_reader,
        lambda one: subjects.chain("client.a", one),
    ):
        with pytest.raises(SchemaError) as caught:
            make(bad)
        assert caught.value.param == "request_id"


@pytest.mark.parametrize(
    "bad", ["", "client", "a.b.c", "a.*", ">.b", "a. b", "a." + "x" * 65, ".b"]
)
def test_readers_that_can_not_stand_in_a_subject(bad: str) -> None:
    """A reader is a broker user and a name, so that permissions can tell readers apart."""
    for make in (subjects.check_reader, subjects.token_stream, subjects.reader_filter):
        with pytest.raises(SchemaError) as caught:
            make(bad)
        assert caught.value.param == "reader"


@pytest.mark.parametrize("bad", ["", "a.b", "*", ">", "a b", "x" * 256, "a\n"])
def test_workers_that_can_not_stand_in_a_subject(bad: str) -> None:
    """Whoever writes a worker id writes to no other subject with it."""
    for make in (
        subjects.cancel, subjects.lease, subjects.kv_lend, subjects.beat, subjects.adopt,
        subjects.control, subjects.kv_snapshot,
    ):  # fmt: skip
        with pytest.raises(SchemaError):
            make(bad)
    for make_of_model in (subjects.prefill, subjects.kv_events):
        with pytest.raises(SchemaError):
            make_of_model("m@r", bad)


@pytest.mark.parametrize("bad", ["", "m", "@", "m@", "m.n@r", "*@r", "m@r@s", "m@r.x"])
def test_served_tokens_that_can_not_stand_in_a_subject(bad: str) -> None:
    """A claim names what is served; what it names is checked before anything is sent there."""
    for make in (subjects.prefill, subjects.decode, subjects.kv_ready):
        with pytest.raises(SchemaError) as caught:
            make(bad)
        assert caught.value.param == "served"


def test_readers_of_bridges_name_their_process() -> None:
    """Who judges a request by its bridge's life finds the bridge in the reader."""
    reader = subjects.bridge_reader("bridge-a-1f2e")
    assert reader == subjects.check_reader("bridge.bridge-a-1f2e")
    assert subjects.bridge_of(reader) == "bridge-a-1f2e"
    for other in ("client.bridge-a-1f2e", subjects.default_reader("request-1")):
        assert subjects.bridge_of(other) is None


def test_a_request_without_reader_reads_under_its_own_id() -> None:
    """A subscriber that knows its request id knows its subject."""
    assert subjects.default_reader("request-1") == "client.request-1"
    assert (
        subjects.token_stream("client.request-1") == "mesh.v1.token-stream.client.request-1.tokens"
    )
