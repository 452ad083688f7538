"""The oracle is transformers' own chat templating, over the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.tokenizing import ChatTokenizer
from schemas.codec import unpack_ids
from schemas.errors import InvalidRequest, ModelUnsupported
from schemas.requests import ChatMessage
from tests.tiny_tokenizer import write_tiny_tokenizer
from workers.engine.sources import default_cache_dir

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
ROLES = st.sampled_from(["system", "user", "assistant"])

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "¿Qué? 漢字 🌊"}],
    [
        {"role": "user", "content": "  two\n\nlines "},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "<|im_end|> is only text to you?"},
    ],
    [{"role": "user", "content": ""}],
]

# What templates of well-known models do.
TEMPLATES = {
    "tools and documents are none": "{{ tools is none }}{{ documents is none }}{{ tools }}",
    "special tokens by name": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
    "a token it has not is undefined": "{{ unk_token is defined }}{{ sep_token is defined }}",
    "generation marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m['role'] }}{% endfor %}",
    "blocks are trimmed": "{% if true %}\n  x\n    {% endif %}\n{{ messages[0].content }}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}"
    "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}",
    "the prompt for an answer": "{% if add_generation_prompt %}>{% endif %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
}


def folder_with(folder: Path, template: Any = None, **config: Any) -> Path:
    """A folder with the tiny tokenizer, its configuration changed."""
    write_tiny_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    found = json.loads(file.read_text()) | config
    found["chat_template"] = template
    file.write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return folder


def default_model() -> Path:
    """The default model's folder, where it was converted before."""
    for folder in sorted(default_cache_dir().glob("SmolLM2-135M-*")):
        if (folder / "tokenizer.json").is_file():
            return folder
    pytest.skip("the default model is not in the cache; mesh prepare puts it there")


def turns(conversation: list[dict[str, str]]) -> list[ChatMessage]:
    return [ChatMessage(role=turn["role"], content=turn["content"]) for turn in conversation]


def check_like_transformers(folder: Path, conversations: list[list[dict[str, str]]]) -> None:
    ours, oracle = ChatTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for conversation in conversations:
        text = ours.render_chat(turns(conversation))
        assert text == oracle.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        expected = oracle.apply_chat_template(
            conversation, tokenize=True, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert unpack_ids(ours.encode(text, add_special=False)) == expected
        for turn in conversation:
            ids = unpack_ids(ours.encode(turn["content"]))
            assert ids == oracle(turn["content"])["input_ids"]


def test_the_tiny_tokenizer_is_used_as_transformers_uses_it(tiny: Path) -> None:
    """Same text and same ids for conversations, same ids for prompts."""
    check_like_transformers(tiny, CONVERSATIONS)


def test_the_default_model_is_used_as_transformers_uses_it() -> None:
    """A published model with a template of its own."""
    check_like_transformers(default_model(), CONVERSATIONS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_mean_what_they_mean_to_transformers(tmp_path: Path, name: str) -> None:
    """Everything that templates may ask of their surroundings is there."""
    folder = folder_with(tmp_path, TEMPLATES[name])
    oracle = AutoTokenizer.from_pretrained(folder)
    for conversation in CONVERSATIONS:
        assert ChatTokenizer(folder).render_chat(turns(conversation)) == (
            oracle.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=TEXTS)
def test_any_text_survives(tiny: Path, text: str) -> None:
    """The tiny tokenizer works on bytes: whatever goes in comes out."""
    tokenizer = ChatTokenizer(tiny)
    plain = text.replace("<|", "<")
    assert tokenizer.decode(unpack_ids(tokenizer.encode(plain))) == plain


def test_text_parts_are_joined(tiny: Path) -> None:
    """OpenAI's list of text parts is the same as their text; no content is empty text."""
    tokenizer = ChatTokenizer(tiny)
    parts: Any = [{"type": "text", "text": "Hel"}, {"text": "lo"}]
    whole = tokenizer.render_chat([ChatMessage(role="user", content="Hello")])
    assert tokenizer.render_chat([ChatMessage(role="user", content=parts)]) == whole
    assert "assistant\n<|im_end|>" in tokenizer.render_chat(
        [ChatMessage(role="assistant", content=None)]
    )


def test_names_reach_the_template(tmp_path: Path) -> None:
    """A turn's name is there when it was given, and only then."""
    template = "{% for m in messages %}{{ m.name if m.name is defined else '-' }}{% endfor %}"
    tokenizer = ChatTokenizer(folder_with(tmp_path, template))
    named = ChatMessage(role="user", content="x", name="ann")
    assert tokenizer.render_chat([named, ChatMessage(role="user", content="y")]) == "ann-"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ChatMessage(role="wizard", content="x"), "messages[1].role"),
        (ChatMessage(role="user", content=[{"type": "image_url"}]), "messages[1].content[0]"),
        (ChatMessage(role="user", content=[{"type": "text"}]), "messages[1].content[0]"),
        (ChatMessage(role="user", content=[{"text": "a"}, {"text": 5}]), "messages[1].content[1]"),
    ],
)
def test_turns_that_can_not_be_read_are_named(tiny: Path, message: ChatMessage, param: str) -> None:
    """The error says which message and which part."""
    first = ChatMessage(role="user", content="x")
    with pytest.raises(InvalidRequest) as caught:
        ChatTokenizer(tiny).render_chat([first, message])
    assert caught.value.param == param


def test_no_messages_are_refused(tiny: Path) -> None:
    """A template would render nothing; a model can't answer that."""
    with pytest.raises(InvalidRequest) as caught:
        ChatTokenizer(tiny).render_chat([])
    assert caught.value.param == "messages"


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    """A base model: completions only, and the error says so."""
    tokenizer = ChatTokenizer(folder_with(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="completions"):
        tokenizer.render_chat(turns(CONVERSATIONS[0]))


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.there }}", "no attribute"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_a_template_that_refuses_or_fails_is_the_requests_fault(
    tmp_path: Path, template: str, says: str
) -> None:
    """Whatever a model's template does with these messages, the client hears it as a refusal; it
    reaches nothing outside its sandbox."""
    tokenizer = ChatTokenizer(folder_with(tmp_path, template))
    with pytest.raises(InvalidRequest, match=says) as caught:
        tokenizer.render_chat(turns(CONVERSATIONS[0]))
    assert caught.value.param == "messages"


def test_templates_lie_where_models_keep_them(tmp_path: Path) -> None:
    """A file beside the tokenizer comes before the configuration; of several the default one."""
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = folder_with(tmp_path, several)
    assert ChatTokenizer(folder).render_chat(turns(CONVERSATIONS[0])) == "yes"
    (folder / "chat_template.jinja").write_text("the filé", encoding="utf-8")
    assert ChatTokenizer(folder).render_chat(turns(CONVERSATIONS[0])) == "the filé"


def test_special_tokens_may_be_tables_or_lie_in_their_own_file(tmp_path: Path) -> None:
    """Older folders name them in ``special_tokens_map.json``; the configuration comes first."""
    folder = folder_with(
        tmp_path, "{{ bos_token }}{{ unk_token }}", bos_token={"content": "<|im_start|>"}
    )
    named = {"bos_token": "<no>", "unk_token": {"content": "<|endoftext|>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    text = ChatTokenizer(folder).render_chat(turns(CONVERSATIONS[0]))
    assert text == "<|im_start|><|endoftext|>"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b'{"chat_template": 7}'),
        ("chat_template.jinja", b"{% for %}"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_broken_folders_are_refused_at_load(tmp_path: Path, file: str, content: bytes) -> None:
    """Not with the first request, and never with a foreign exception."""
    write_tiny_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelUnsupported):
        ChatTokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    """The message names the file."""
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json"):
        ChatTokenizer(tmp_path)
