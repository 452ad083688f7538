"""Text to token ids, once per request, in admission.

A model folder's ``tokenizer.json`` is run by the ``tokenizers`` library; its chat template, as
Hugging Face writes them, by a sandboxed Jinja. No torch, no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from schemas.errors import InvalidRequest, ModelUnsupported
from schemas.requests import ChatMessage

_ROLES = ("system", "developer", "user", "assistant", "tool")


class _RefusedByTemplate(Exception):
    """``raise_exception`` in a chat template."""


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
        self._special = {
            name: _token_text(config.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self._template = self._load_template(config)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`render_chat` can work."""
        return self._template is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of text; ``add_special``: with those that the tokenizer itself adds."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as the model's chat template writes it, up to where it is to answer.

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
                messages=turns, add_generation_prompt=True, **self._special
            )
        except _RefusedByTemplate as error:
            raise InvalidRequest(f"the chat template says: {error}", param="messages") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the chat template can't render these messages: {error}", param="messages"
            ) from error

    def _load_template(self, config: dict[str, Any]) -> jinja2.Template | None:
        file = self.folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else config.get("chat_template")
        if isinstance(source, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("default")
        if not source:
            return None
        try:
            return _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnsupported(f"chat template of {self.folder}: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


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
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ModelUnsupported(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise ModelUnsupported(f"{file} holds no table")
    return found
