"""Log lines: JSON for machines, columns for people, made without global state.

Events are past tense and snake_case; facts are fields. Never log prompts, tokens' text or keys.
A child of ``mesh up`` writes JSON to stdout (its log file) and repeats what is a warning or worse
as one short line on stderr, which the supervisor shows.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

Logger = FilteringBoundLogger

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
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if echo is not None:
        processors.append(_Echo(echo))
    if format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=stream.isatty()))
    logger: Logger = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        process=process,
    )
    return logger


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


def capture_libraries(logger: Logger, level: int = logging.WARNING) -> None:
    """Send what libraries log through ``logging``, from ``level`` up, to ``logger``. Changes the
    process's root logger: for a process of its own only."""
    root = logging.getLogger()
    root.handlers[:] = [_Bridge(logger)]
    root.setLevel(level)
