"""Log lines: JSON for machines, columns for people, made without global state.

Events are past tense and snake_case; facts are fields. Never log prompts, tokens' text or keys.
A child of ``mesh up`` writes JSON to stdout (its log file) and repeats what is a warning or worse
as one short line on stderr, which the supervisor shows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any, TextIO

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger, Processor

from infra.steady import SteadyStream

Logger = FilteringBoundLogger

_METHOD_LEVELS = {"warn": "warning", "exception": "error"}  # of those called otherwise
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


def make_logger(
    process: str,
    *,
    level: str = "info",
    format: str = "json",
    stream: TextIO | None = None,
    echo: TextIO | None = None,
) -> Logger:
    """A logger whose lines carry ``process``.

    Args:
        format: "json" or "console".
        stream: where lines go; stdout unless given.
        echo: where warnings and worse are repeated in short; nowhere unless given.
    """
    stream = stream or sys.stdout
    logger: Logger = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=_processors(format, stream, echo),
        wrapper_class=_line_logger(level),
        process=process,
    )
    return logger


def set_up_process(
    process: str,
    *,
    level: str = "info",
    format: str = "json",
    stream: TextIO | None = None,
    echo: TextIO | None = None,
) -> Logger:
    """The logger of a process that is all ours: modules' own ``structlog.get_logger`` and the
    standard library's loggers (from warnings up) write the same lines to the same stream, stdout
    unless given."""
    stream = stream or sys.stdout
    structlog.configure(
        processors=_processors(format, stream, echo, process=process),
        wrapper_class=_line_logger(level),
        logger_factory=structlog.WriteLoggerFactory(SteadyStream(stream)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    logger: Logger = structlog.get_logger().bind()  # itself: the proxy looks it up for each line
    root = logging.getLogger()
    root.handlers[:] = [_Bridge(logger)]
    root.setLevel(logging.WARNING)
    return logger


def _line_logger(level: str) -> type[Any]:
    """The library's logger, but for its way to a line, which copies the facts three times more and
    asks what came out: here that is a line, and costs two thirds."""
    base: Any = structlog.make_filtering_bound_logger(_LEVELS[level])

    class LineLogger(base):  # type: ignore[misc]
        def _proxy_to_logger(self, method: str, event: str, /, **facts: Any) -> None:
            line: Any = {**self._context, **facts, "event": event}
            try:
                for processor in self._processors:
                    line = processor(self._logger, method, line)
            except structlog.DropEvent:
                return  # a processor has taken it, as those of tests do
            self._logger.msg(line)

    return LineLogger


def _processors(
    format: str, stream: TextIO, echo: TextIO | None, process: str | None = None
) -> list[Processor]:
    processors: list[Processor] = [_Stamp(process)]
    if echo is not None:
        processors.append(_Echo(echo))
    if format == "json":
        return [*processors, _as_json]
    return [*processors, structlog.dev.ConsoleRenderer(colors=stream.isatty())]


def _as_json(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    try:
        return _encode(event).decode()
    except UnicodeEncodeError:  # half a character, out of the name of a file, say
        return json.dumps(event, default=repr)


_encode = msgspec.json.Encoder(enc_hook=repr).encode


class _Stamp:
    """Adds level, time and, when it is given, the process. A request has several lines, so the
    parts of a second are all that is written anew in each."""

    def __init__(self, process: str | None) -> None:
        self._process = process
        self._second = -1
        self._until_second = ""

    def __call__(
        self, _logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if self._process is not None:
            event.setdefault("process", self._process)
        event["level"] = _METHOD_LEVELS.get(method, method)
        second, ns = divmod(time.time_ns(), 1_000_000_000)
        if second != self._second:
            self._second = second
            self._until_second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        event["timestamp"] = f"{self._until_second}.{ns // 1000:06d}Z"
        return event


class _Echo:
    """Repeats warnings and worse in short, before the line is rendered."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(
        self, _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if _LEVELS[event["level"]] >= _LEVELS["warning"]:
            hidden = ("level", "timestamp", "event", "process", "exc_info")
            facts = " ".join(f"{key}={value}" for key, value in event.items() if key not in hidden)
            if event.get("exc_info"):
                facts += f" ({sys.exception()!r})"
            with contextlib.suppress(OSError):  # a supervisor that died must not stop the drain
                print(f"{event['level']}: {event['event']} {facts}", file=self._stream, flush=True)
        return event


class _Bridge(logging.Handler):
    """Gives records of the standard library's loggers to ours."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log(
            max(record.levelno, logging.DEBUG),
            "library_logged",
            library=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )
