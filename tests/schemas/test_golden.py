"""The wire is a contract: the bytes of every message are kept in ``golden/``.

After a change that is meant (a new field with a default), write them anew and look at the
difference of the ``.json`` files::

    MESH_WRITE_GOLDEN=1 pytest tests/schemas/test_golden.py
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

import schemas
from schemas.codec import Message, decode, decode_json, encode, tag_of
from schemas.errors import SchemaError
from schemas.tokens import StreamMessage, decode_chain_entry, decode_stream_message
from tests.schemas.samples import SAMPLES

GOLDEN = Path(__file__).parent / "golden"
WRITES = bool(os.environ.get("MESH_WRITE_GOLDEN"))

each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: tag_of(type(sample)))


def file_of(kind: type[Message], suffix: str) -> Path:
    return GOLDEN / f"{tag_of(kind).replace('/', '-')}.{suffix}"


def golden(sample: Message) -> bytes:
    return file_of(type(sample), "msgpack").read_bytes()


def all_messages() -> set[type[Message]]:
    """Every class below ``schemas`` that travels on its own."""
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"schemas.{module.name}")

    def below(kind: type[Message]) -> set[type[Message]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    return {kind for kind in below(Message) - {Message} if kind.__module__.startswith("schemas.")}


def plain(value: Any) -> Any:
    """What a decoder without our classes gives: maps, lists, text, bytes and numbers."""
    return msgpack.unpackb(msgpack.packb(msgspec.to_builtins(value, builtin_types=(bytes,),
                                                             str_keys=False)),
                           strict_map_key=False)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _written() -> None:
    if not WRITES:
        return
    for sample in SAMPLES:
        file_of(type(sample), "msgpack").write_bytes(encode(sample))
        readable = msgspec.json.format(msgspec.json.encode(sample), indent=2)
        file_of(type(sample), "json").write_bytes(readable + b"\n")


def test_every_message_has_a_sample_and_golden_files() -> None:
    """A new message is not finished without its bytes; a removed one takes them along."""
    assert {type(sample) for sample in SAMPLES} == all_messages()
    expected = {file_of(kind, suffix) for kind in all_messages() for suffix in ("msgpack", "json")}
    assert set(GOLDEN.iterdir()) == expected


def test_tags_are_unique_and_versioned() -> None:
    """``<name>/<version>``: a decoder of several classes can tell them apart, and their age."""
    tags = [tag_of(kind) for kind in all_messages()]
    assert len(set(tags)) == len(tags)
    assert all(name and int(version) > 0 for name, _, version in (t.partition("/") for t in tags))


@each_sample
def test_bytes_are_the_golden_ones(sample: Message) -> None:
    """What we write today is, byte for byte, what we wrote before."""
    assert encode(sample) == golden(sample)


@each_sample
def test_golden_bytes_decode_to_the_sample(sample: Message) -> None:
    """What was written before is understood today, as MessagePack and as JSON."""
    assert decode(golden(sample), type(sample)) == sample
    assert decode_json(file_of(type(sample), "json").read_bytes(), type(sample)) == sample


@each_sample
def test_any_messagepack_library_reads_and_writes_it(sample: Message) -> None:
    """The bytes are plain MessagePack: a map with text keys, the tag under ``schema``."""
    fields = msgpack.unpackb(golden(sample), strict_map_key=False)
    assert fields == plain(sample)
    assert fields["schema"] == tag_of(type(sample))
    assert decode(msgpack.packb(fields), type(sample)) == sample


@each_sample
def test_samples_set_every_field(sample: Message) -> None:
    """A field at its default does not travel, so its place in the golden bytes would be blank."""
    on_the_wire = msgpack.unpackb(golden(sample), strict_map_key=False).keys()
    assert set(on_the_wire) == {"schema", *(field.name for field in msgspec.structs.fields(sample))}


@each_sample
def test_unknown_fields_are_ignored(sample: Message) -> None:
    """A newer peer may add fields, whatever they hold."""
    fields = plain(sample) | {"new_field": {"nested": [1, {"x": b"y"}]}, "another": None}
    assert decode(msgpack.packb(fields), type(sample)) == sample


@each_sample
def test_a_missing_field_is_named(sample: Message) -> None:
    """Without any one of the fields that have no default it is refused, naming the field."""
    required = [field.name for field in msgspec.structs.fields(sample) if field.required]
    assert required
    for name in required:
        fields = plain(sample)
        del fields[name]
        with pytest.raises(SchemaError) as caught:
            decode(msgpack.packb(fields), type(sample))
        assert caught.value.param == f"$.{name}"


@each_sample
def test_a_wrong_type_is_named(sample: Message) -> None:
    """A field of another type is refused with its path."""
    for name in plain(sample).keys() - {"schema"}:
        is_number = isinstance(getattr(sample, name), float)
        wrong = plain(sample) | {name: "much" if is_number else 1.5}
        with pytest.raises(SchemaError) as caught:
            decode(msgpack.packb(wrong), type(sample))
        assert caught.value.param == f"$.{name}"


@each_sample
def test_another_tag_is_refused(sample: Message) -> None:
    """Another message, or another version of this one, is not taken for it."""
    name, _, version = tag_of(type(sample)).partition("/")
    for tag in (f"{name}/{int(version) + 1}", "nonsense", 7):
        with pytest.raises(SchemaError) as caught:
            decode(msgpack.packb(plain(sample) | {"schema": tag}), type(sample))
        assert caught.value.param == "$.schema"


@each_sample
def test_cut_or_lengthened_bytes_are_refused(sample: Message) -> None:
    """Cut anywhere, or with something behind: never taken for a shorter message."""
    data = golden(sample)
    for end in range(len(data)):
        with pytest.raises(SchemaError):
            decode(data[:end], type(sample))
    with pytest.raises(SchemaError):
        decode(data + b"\xc0", type(sample))


def test_readers_tell_the_messages_of_their_stream_apart() -> None:
    """Everything that lies in a token stream is known by its tag; nothing else is taken."""
    of_streams = {kind for kind in all_messages() if kind in StreamMessage.__args__}
    for sample in SAMPLES:
        if type(sample) in of_streams:
            assert decode_stream_message(golden(sample)) == sample
        else:
            with pytest.raises(SchemaError):
                decode_stream_message(golden(sample))


def test_tokens_are_no_chain_entries() -> None:
    """A batch that lies on a chain by mistake does not count there."""
    for sample in SAMPLES:
        if tag_of(type(sample)) in ("token-batch/1", "accepted/1"):
            with pytest.raises(SchemaError):
                decode_chain_entry(golden(sample))
