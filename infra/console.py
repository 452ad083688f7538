"""What ``mesh up`` says: lines for good, and one line of progress while something takes long."""

from __future__ import annotations

import shlex
import time

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from infra.config import UpConfig
from schemas import subjects
from schemas.control import Beat


class UpConsole:
    """Lines on stdout; a spinner below them when stdout is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._started_s = time.monotonic()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(escape(line))

    def progress(self, text: str) -> None:
        """What takes long: the spinner's text, or a line where there is no terminal."""
        if self._console.is_terminal:
            self.spin(text)
        else:
            self.say(text)

    def spin(self, text: str) -> None:
        """The spinner's text; empty takes it away. Nothing where there is no terminal."""
        if not text or not self._console.is_terminal:
            self.close()
        elif self._status is None:
            self._status = self._console.status(escape(text))
            self._status.start()
        else:
            self._status.update(escape(text))

    def close(self) -> None:
        """Take the spinner away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def ready(self, name: str, beat: Beat, *, again: bool) -> None:
        """A process is ready, for the first time or ``again``."""
        facts = [f"pid {beat.pid}"]
        if beat.served:
            model = subjects.split_served(beat.served)[0]
            facts += [model, beat.engine]
        self.say(f"{name:<16} ready{' again' if again else ''}  {', '.join(facts)}")

    def greet(self, config: UpConfig) -> None:
        """Everything is ready: where it is and how to use it."""
        base = f"{config.bridge.scheme}://{_reachable(config.bridge.host)}:{config.bridge.port}"
        model = config.models[0].name
        body = msgspec.json.encode(
            {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
        ).decode()
        key = '-H "Authorization: Bearer $MESH_API_KEY" ' if config.bridge.has_keys else ""
        data = config.bus.data
        self.say(
            f"\nready after {time.monotonic() - self._started_s:.1f} s: {base}/v1\n\n"
            f"  curl {base}/v1/chat/completions -H 'Content-Type: application/json' {key}"
            f"-d {shlex.quote(body)}\n"
            f"  mesh generate Hello! --model {shlex.quote(model)} --data {shlex.quote(str(data))}"
            f"\n\nCtrl-C stops. Logs: {data / 'logs'}"
        )


def _reachable(host: str) -> str:
    """Where a client on this machine reaches a listener on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
