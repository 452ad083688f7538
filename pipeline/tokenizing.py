"""Text to token ids, once per request, in admission.

A model folder's ``tokenizer.json`` is run by the ``tokenizers`` library; its chat template, as
Hugging Face writes them, by a sandboxed Jinja. No torch, no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from pipeline.word_tokens import WordTokens
from schemas.codec import pack_ids
from schemas.errors import InvalidRequest, ModelUnsupported
from schemas.requests import ChatMessage

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
)


class _RefusedByTemplate(Exception):
    """``raise_exception`` in a chat template."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``: marks the model's own words in training data.

    Here they are text like any other.
    """

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTokenizer:
    """The tokenizer of one model folder.

    Raises:
        ModelUnsupported: ``tokenizer.json`` or the chat template can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ModelUnsupported(f"{folder / 'tokenizer.json'}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        named = _read_json(folder / "special_tokens_map.json") | config
        texts = {name: _token_text(named.get(name)) for name in _SPECIAL_TOKENS}
        self._special = {name: text for name, text in texts.items() if text}
        self._template = self._load_template(config)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocabulary), default=1)
        self._words = WordTokens.of(self._tokenizer, _read_json(folder / "tokenizer.json"))

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can work."""
        return self._template is not None

    def least_num_tokens(self, text: str) -> int:
        """A lower bound of how many tokens ``text`` has, without tokenizing it: what is far too
        long should not cost a minute of CPU to refuse."""
        return len(text) // self._longest_token

    def encode(self, text: str, *, add_special: bool = True) -> bytes:
        """Token ids of text, packed as they travel (see :func:`schemas.codec.pack_ids`);
        ``add_special``: with those that the tokenizer itself adds."""
        known = self.encode_known(text)
        if known is not None:
            return known
        # As ``encode``, without the place of each token in the text: a quarter of its time.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        return pack_ids(found.ids)

    def encode_known(self, text: str) -> bytes | None:
        """The same of text whose words were seen before, all but a few, in a tenth of the time;
        None: it is for :meth:`encode`. Takes 1 ms at most."""
        return None if self._words is None else self._words.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``, special tokens left out or by name."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def render_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model's chat template writes it, up to where it is to answer
        (``add_generation_prompt``) or to the end of the last turn.

        Its special tokens are in the text: encode it with ``add_special=False``.

        Raises:
            InvalidRequest: no template, no messages, or the template refuses them; ``param``
                names the message.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use completions with a prompt", param="messages"
            )
        if not messages:
            raise InvalidRequest("messages may not be empty", param="messages")
        turns = [_plain_turn(number, message) for number, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except _RefusedByTemplate as error:
            raise InvalidRequest(f"the chat template says: {error}", param="messages") from error
        except Exception as error:  # a template is a program, and not ours
            raise InvalidRequest(
                f"the chat template can't render these messages: {error}", param="messages"
            ) from error

    def _load_template(self, config: dict[str, Any]) -> jinja2.Template | None:
        file = self.folder / "chat_template.jinja"
        source = config.get("chat_template")
        try:
            if file.exists():
                source = file.read_text(encoding="utf-8")
            if isinstance(source, list):  # several named ones
                source = {one["name"]: one["template"] for one in source}.get("default")
            return _environment().from_string(source) if source else None
        except (jinja2.TemplateError, OSError, ValueError, TypeError, KeyError) as error:
            raise ModelUnsupported(f"chat template of {self.folder}: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates expect it; Jinja's own escapes what is special in HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplate(message)


def _plain_turn(number: int, message: ChatMessage) -> dict[str, Any]:
    """A turn with its text parts joined, as templates of text models expect it."""
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"role must be one of {', '.join(_ROLES)}, not {message.role!r}",
            param=f"messages[{number}].role",
        )
    content = message.content
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = "".join(
            _part_text(part, f"messages[{number}].content[{place}]")
            for place, part in enumerate(content)
        )
    turn = {"role": message.role, "content": content}
    return turn | {"name": message.name} if message.name else turn


def _part_text(part: dict[str, Any], where: str) -> str:
    text = part.get("text")
    if part.get("type", "text") != "text" or not isinstance(text, str):
        raise InvalidRequest("only parts of type 'text' can be read", param=where)
    return text


def _token_text(token: Any) -> str:
    """A special token is text, or a table with its text under ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnsupported(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise ModelUnsupported(f"{file} holds no table")
    return found
