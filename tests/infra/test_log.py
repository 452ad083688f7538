"""Log lines."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import structlog

from infra.log import make_logger


def test_a_line_is_json_with_process_level_time_and_fields() -> None:
    """One object per line, for machines."""
    out = io.StringIO()
    log = make_logger("worker-a-1", stream=out)
    log.info("stage_handled", stage="prefill", seconds=0.5)
    line = json.loads(out.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "stage_handled",
        "level": "info",
        "process": "worker-a-1",
        "stage": "prefill",
        "seconds": 0.5,
    }


def test_what_is_less_severe_than_the_level_is_not_written() -> None:
    """``level`` is the least severe."""
    out = io.StringIO()
    log = make_logger("p", level="warning", stream=out)
    log.info("small_thing_happened")
    assert out.getvalue() == ""
    log.warning("big_thing_happened")
    assert "big_thing_happened" in out.getvalue()


def test_warnings_are_echoed_in_short() -> None:
    """A supervisor shows what a child says on its stderr: warnings and worse, one line each."""
    out, echo = io.StringIO(), io.StringIO()
    log = make_logger("p", stream=out, echo=echo)
    log.info("all_went_well")
    log.warning("message_redelivered", stage="decode")
    try:
        raise ValueError("told")
    except ValueError:
        log.exception("stage_failed")
    warning, error = echo.getvalue().splitlines()
    assert warning == "warning: message_redelivered stage=decode"
    assert error.startswith("error: stage_failed")
    assert "ValueError('told')" in error
    assert len(out.getvalue().splitlines()) == 3


def test_a_broken_echo_does_not_stop_the_process() -> None:
    """The supervisor may be dead when its child logs that it drains."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    out = io.StringIO()
    make_logger("p", stream=out, echo=Broken()).warning("supervisor_lost")
    assert "supervisor_lost" in out.getvalue()


@pytest.mark.parametrize("format", ["json", "console"])
def test_an_exception_is_written_with_its_traceback(format: str) -> None:
    """In both formats."""
    out = io.StringIO()
    log = make_logger("p", format=format, stream=out)
    try:
        raise ValueError("told")
    except ValueError:
        log.exception("stage_failed")
    assert "ValueError: told" in out.getvalue()
    assert "test_an_exception_is_written" in out.getvalue()


def test_a_fact_may_be_called_as_it_likes_and_a_taken_line_is_not_written() -> None:
    """Facts come from many hands; tests take lines where they are made."""
    out = io.StringIO()
    log = make_logger("p", stream=out)
    log.info("request_ended", method="POST")
    assert json.loads(out.getvalue())["method"] == "POST"

    def take(*_: object) -> None:
        raise structlog.DropEvent

    out.truncate(0)
    logger: Any = structlog.wrap_logger(
        structlog.WriteLogger(out), processors=[take], wrapper_class=type(log.bind())
    )
    logger.info("line_taken")
    assert out.getvalue() == ""
