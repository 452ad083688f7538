"""What ``mesh up`` says: lines for good, and one line of progress while something takes long."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status


class UpConsole:
    """Lines on stdout; a spinner below them when stdout is a terminal.

    Where it is none, each new text of :meth:`progress` is a line of its own.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._last = ""
        self._started_s = time.monotonic()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(escape(line))

    def progress(self, text: str) -> None:
        """What is being waited for; empty ends the progress line."""
        if text == self._last:
            return
        self._last = text
        if not self._console.is_terminal:
            if text:
                self.say(text)
        elif not text:
            self.close()
        elif self._status is None:
            self._status = self._console.status(escape(text))
            self._status.start()
        else:
            self._status.update(escape(text))

    def close(self) -> None:
        """Take the progress line away."""
        self._last = ""
        if self._status is not None:
            self._status.stop()
            self._status = None

    @property
    def age_s(self) -> float:
        """Seconds since this console was made."""
        return time.monotonic() - self._started_s
