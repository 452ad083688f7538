"""What only tells must not stop what works.

A count that is refused, or a log line that a full disk does not take, is dropped. That a count was
is said on stderr, once per metric: it is a mistake in our own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from bisect import bisect_left
from collections import deque
from typing import Any, Self, TextIO

import prometheus_client

_said: set[str] = set()


def _say(metric: str, error: Exception) -> None:
    if metric not in _said:
        _said.add(metric)
        with contextlib.suppress(OSError, ValueError):
            print(f"error: metric_dropped metric={metric} reason={error!r}", file=sys.stderr)


class _Labelled:
    """``labels`` of the classes below."""

    _name: str

    def labels(self, *values: Any, **named: Any) -> Self:
        """See ``prometheus_client``; labels that do not fit give what counts for nothing."""
        try:
            return super().labels(*values, **named)  # type: ignore[misc, no-any-return]
        except Exception as error:
            _say(self._name, error)
            return _NOTHING  # type: ignore[return-value]


class Counter(_Labelled, prometheus_client.Counter):
    """A counter that never raises. It has no exemplars: what the library does for those takes
    longer than to count, and every request is counted several times."""

    def inc(self, amount: float = 1) -> None:  # type: ignore[override]
        """See ``prometheus_client``."""
        try:
            if amount < 0:
                raise ValueError(f"a counter can't go down by {-amount}")
            self._value.inc(amount)
        except Exception as error:
            _say(self._name, error)


class Gauge(_Labelled, prometheus_client.Gauge):
    """A gauge that never raises."""

    def set(self, value: float) -> None:
        """See ``prometheus_client``."""
        try:
            super().set(value)
        except Exception as error:
            _say(self._name, error)

    def inc(self, amount: float = 1) -> None:
        """See ``prometheus_client``."""
        try:
            super().inc(amount)
        except Exception as error:
            _say(self._name, error)

    def dec(self, amount: float = 1) -> None:
        """See ``prometheus_client``."""
        try:
            super().dec(amount)
        except Exception as error:
            _say(self._name, error)


class Histogram(_Labelled, prometheus_client.Histogram):
    """A histogram that never raises, nor has exemplars."""

    def observe(self, amount: float) -> None:  # type: ignore[override]
        """See ``prometheus_client``."""
        try:
            self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)
            self._sum.inc(amount)
        except Exception as error:
            _say(self._name, error)


class _Nothing:
    """In place of a metric that can't be had."""

    def inc(self, *_: Any) -> None: ...
    def dec(self, *_: Any) -> None: ...
    def set(self, *_: Any) -> None: ...
    def observe(self, *_: Any) -> None: ...


_NOTHING = _Nothing()


class SteadyStream:
    """A stream whose writes never raise: what a full disk or a closed pipe refuses is lost.

    Within an event loop all that is written in one turn leaves in one write at its end, also where
    the stream itself keeps nothing back, as under ``PYTHONUNBUFFERED``: a line by itself costs as
    much as what it tells of.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._unwritten: deque[str] = deque()  # until the next flush, which follows each line
        self._flushing: asyncio.AbstractEventLoop | None = None  # it will, at the end of its turn

    def write(self, text: str) -> None:
        """Take ``text``, to be written with the next flush."""
        self._unwritten.append(text)

    def flush(self) -> None:
        """Write, or not; soon within an event loop, else now."""
        if self._flushing is not None and self._flushing.is_running():
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._flush_now()
            return
        self._flushing = loop
        loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = None
        texts: list[str] = []
        with contextlib.suppress(IndexError):  # another thread may flush as well
            while True:
                texts.append(self._unwritten.popleft())
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("".join(texts))
            self._stream.flush()
