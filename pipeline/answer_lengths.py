"""How long answers are, per model, as far as they have been seen. Pure and bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_OPEN = 100_000  # requests whose end is awaited; an end may be missed
_MEMORY = 512  # answers that weigh in a mean: it follows a change of what is asked


@dataclass(slots=True)
class _Mean:
    mean: float = 0.0
    num: int = 0

    def take(self, value: float) -> None:
        self.num = min(self.num + 1, _MEMORY)
        self.mean += (value - self.mean) / self.num


class AnswerLengths:
    """Running means of tokens per answer."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, str] = OrderedDict()  # request -> model, oldest first
        self._means: dict[str, _Mean] = {}

    def begin(self, request_id: str, served: str) -> None:
        """A request is being worked on."""
        self._open[request_id] = served
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def end(self, request_id: str, num_tokens: int | None) -> None:
        """It ended, with so many tokens; None: it was cut off, which says nothing of others."""
        served = self._open.pop(request_id, None)
        if served is None or num_tokens is None:
            return
        mean = self._means.get(served)
        if mean is None:
            mean = self._means[served] = _Mean()
        mean.take(num_tokens)

    def mean(self, served: str) -> float | None:
        """Tokens per answer; None before the first."""
        found = self._means.get(served)
        return None if found is None else found.mean
