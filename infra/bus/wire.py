"""The client's side of the wire, for messages: what every token and every task passes.

nats-py's parser matches each line against up to six patterns, copies what is left of its buffer for
each message, and hands messages over through a queue and a task per subscription. Here a message
that is whole goes from the socket's bytes to its callback at once; all else (control lines, a
message torn by the end of a read, subscriptions without a callback of ours) is left to the
library's parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import nats.errors
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_VERSION = "NATS/1.0"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LINE_BREAKS = re.compile(r"[\r\n]+")
_MAX_TORN_BYTES = 1 << 18  # of a message that is kept for the next read; more is the library's


class Msg:
    """A message as it came. Most are read without a look at most of their headers, so ``header``
    has the bytes of all, empty without any, and they are parsed when they are first asked for."""

    __slots__ = ("_headers", "data", "header", "reply", "subject")

    def __init__(self, subject: str, reply: str, data: bytes, header: bytes = b"") -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self.header = header
        self._headers: dict[str, str] | None = None

    @property
    def headers(self) -> dict[str, str] | None:
        """Those of the message, see :func:`parse_headers`; None without any."""
        if self._headers is None and self.header:
            self._headers = parse_headers(self.header)
        return self._headers


Callback = Callable[[Msg], None]


class MessageParser(Parser):
    """Hands whole messages to ``client.deliver``.

    Args:
        client: takes ``deliver(sid, subject, reply, data, header)``, all but the number as bytes,
            and says whether it has.

    Attributes:
        on_parsed: told how many bytes each call of :meth:`parse` was given, after it.
    """

    def __init__(self, client: Any) -> None:
        self._torn = b""
        self.on_parsed: Callable[[int], None] = lambda num_bytes: None
        super().__init__(client)

    def reset(self) -> None:
        """Forget what an old connection left."""
        self._torn = b""
        super().reset()

    async def parse(self, data: bytes = b"") -> None:
        """Take what a read brought.

        Raises:
            ProtocolError: this is no NATS.
        """
        rest = self.take(data)
        if rest:
            await super().parse(rest)
        self.on_parsed(len(data))

    def take(self, data: bytes) -> bytes:
        """Deliver the messages at the beginning of what a read brought; the rest, which is for
        :meth:`parse`: nothing when there are only messages, the last one torn, maybe."""
        if self.buf or self.state != AWAITING_CONTROL_LINE:
            return data  # the library goes on with what it began
        if self._torn:
            data, self._torn = self._torn + data, b""
        start, size = 0, len(data)
        while start < size:
            end = self._message(data, start)
            if end <= start:
                break
            start = end
        rest = data[start:]
        if rest and end == start and _is_message(rest) and len(rest) < _MAX_TORN_BYTES:
            self._torn = rest
            return b""
        return rest

    def _message(self, data: bytes, start: int) -> int:
        """Deliver the message that begins at ``start``; its end, ``start`` when there is no
        whole one, or less when it is for the library."""
        line_end = data.find(b"\r\n", start)
        if line_end < 0:
            return start
        words = data[start:line_end].split()
        if len(words) < 4 or words[0] not in (b"MSG", b"HMSG"):
            return start
        has_header = words[0] == b"HMSG"
        try:
            sid, size = int(words[2]), int(words[-1])
            header_size = int(words[-2]) if has_header else 0
        except ValueError:
            return start - 1  # it says what is wrong
        begins = line_end + 2
        end = begins + size + 2
        if len(data) < end:
            return start
        num_fixed = 5 if has_header else 4
        is_taken = self.nc.deliver(
            sid,
            words[1],
            words[3] if len(words) > num_fixed else b"",
            data[begins + header_size : end - 2],
            data[begins : begins + header_size],
        )
        return end if is_taken else start - 1


def _is_message(data: bytes) -> bool:
    return data.startswith((b"MSG ", b"HMSG "))


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers as they go on the wire.

    Raises:
        BadHeaderError: a name that is none. Line breaks in a value become blanks.
    """
    lines = [_VERSION]
    for name, value in headers.items():
        _check_name(name)
        value = value.strip()
        if "\n" in value or "\r" in value:
            value = _LINE_BREAKS.sub(" ", value)
        lines.append(f"{name}: {value}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@lru_cache(256)
def _check_name(name: str) -> None:
    if not _HEADER_NAME.fullmatch(name):
        raise nats.errors.BadHeaderError(name)


def number_in(header: bytes, mark: bytes) -> int | None:
    """The number behind ``mark``, a header's name with the line break before it and the colon and
    blank behind it: the last one's, as :func:`parse_headers` has it. None without such a header."""
    at = header.rfind(mark)
    if at < 0:
        return None
    start = at + len(mark)
    return int(header[start : header.find(b"\r", start)])


def parse_headers(header: bytes) -> dict[str, str]:
    """The headers of a message; a status line, which the broker itself writes, becomes ``Status``
    and ``Description``."""
    status, *lines = header.decode(errors="replace").split("\r\n")
    found: dict[str, str] = {}
    if len(status) > len(_VERSION):
        _, found["Status"], *words = status.split(" ", 2)
        if words:
            found["Description"] = words[0]
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found
