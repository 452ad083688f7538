"""What a client read, and how it differs from what it would have read undisturbed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from schemas.tokens import Usage

Logprob = tuple[int, float]  # token id, logprob rounded to what arithmetic keeps


@dataclass(slots=True)
class Answer:
    """One request's answer as it arrives.

    ``ids`` and ``logprobs`` stay empty where the client sees text only. ``error`` is a code; a
    request that neither failed nor ended is hung. ``event_s`` are monotonic times.
    """

    num_choices: int
    request_id: str = ""
    last_event_id: str = ""  # of server-sent events: where to read on
    ids: list[list[int]] = field(init=False)
    texts: list[str] = field(init=False)
    logprobs: list[list[Logprob]] = field(init=False)
    reasons: list[str] = field(init=False)
    num_events: list[int] = field(init=False)  # that brought tokens
    is_counted: bool = False  # the texts are events, one character each
    usage: Usage | None = None
    is_complete: bool = False
    error: str = ""
    message: str = ""
    event_s: list[float] = field(default_factory=list)
    num_resumed: int = 0

    def __post_init__(self) -> None:
        self.ids = [[] for _ in range(self.num_choices)]
        self.texts = [""] * self.num_choices
        self.logprobs = [[] for _ in range(self.num_choices)]
        self.reasons = [""] * self.num_choices
        self.num_events = [0] * self.num_choices

    @property
    def has_ended(self) -> bool:
        """Nothing more comes."""
        return self.is_complete or bool(self.error)

    @property
    def num_tokens(self) -> int:
        """Of all choices, where ids are seen."""
        return sum(len(run) for run in self.ids)

    def beginning(self, part: Answer) -> Answer:
        """As much of this answer as ``part`` has."""
        made = Answer(self.num_choices)
        for index in range(self.num_choices):
            made.ids[index] = self.ids[index][: len(part.ids[index])]
            made.texts[index] = self.texts[index][: len(part.texts[index])]
            made.logprobs[index] = self.logprobs[index][: len(part.logprobs[index])]
            made.reasons[index] = part.reasons[index] and self.reasons[index]
        return made

    def complete(self, usage: Usage | None, now_s: float) -> None:
        """The end was read."""
        self.usage = usage
        self.is_complete = True
        self.event_s.append(now_s)

    def fail(self, code: str, message: str) -> None:
        """The request failed; the first reason stays."""
        if not self.has_ended:
            self.error, self.message = code, message

    def recovery_s(self, struck_s: float) -> float | None:
        """From the blow to the end of the longest pause after it; None when nothing came.

        The very next event would be one that was on its way already when the blow fell.
        """
        last_s, longest_s, recovered_s = struck_s, 0.0, None
        for event_s in self.event_s:
            if event_s <= struck_s:
                continue
            if event_s - last_s >= longest_s:
                longest_s, recovered_s = event_s - last_s, event_s - struck_s
            last_s = event_s
        return recovered_s


@dataclass(frozen=True, slots=True)
class Differences:
    """Counts, in tokens."""

    lost: int = 0
    duplicate: int = 0
    wrong: int = 0

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            self.lost + other.lost, self.duplicate + other.duplicate, self.wrong + other.wrong
        )

    def __bool__(self) -> bool:
        return bool(self.lost or self.duplicate or self.wrong)


NO_DIFFERENCE = Differences()


def compare(expected: Answer, got: Answer) -> Differences:
    """Where a complete answer differs, in tokens of the expected one.

    Text alone counts where the client saw no ids: characters are then converted at the answer's
    mean token length, and a difference is never less than one token.
    """
    total = NO_DIFFERENCE
    for index in range(expected.num_choices):
        ids, got_ids = expected.ids[index], got.ids[index]
        text, got_text = expected.texts[index], got.texts[index]
        if got_ids:
            found = differences(ids, got_ids)
            if not found and text != got_text:
                found = Differences(wrong=1)  # the right tokens as the wrong text
        else:
            mean = max(1.0, len(text) / max(1, len(ids)))
            found = differences(text, got_text, unit=mean)
        if not found and expected.reasons[index] != got.reasons[index]:
            found = Differences(wrong=1)
        if got_ids and not found and expected.logprobs[index] != got.logprobs[index]:
            pairs = zip(expected.logprobs[index], got.logprobs[index], strict=False)
            found = Differences(wrong=max(1, sum(a != b for a, b in pairs)))
        total += found
    return total


def differences(
    expected: Sequence[object], got: Sequence[object], *, unit: float = 1.0
) -> Differences:
    """What must be taken out of or put into ``got`` to have ``expected``.

    What is missing is lost, what repeats the part in front of it is duplicate, all else is wrong.
    Counts are divided by ``unit`` and rounded up.
    """
    if len(expected) == len(got) and expected == got:
        return NO_DIFFERENCE
    lost = duplicate = wrong = 0
    matcher = SequenceMatcher(None, list(expected), list(got), autojunk=False)
    for kind, from_e, to_e, from_g, to_g in matcher.get_opcodes():
        if kind == "delete":
            lost += to_e - from_e
        elif kind == "insert":
            if _repeats(got, from_g, to_g):
                duplicate += to_g - from_g
            else:
                wrong += to_g - from_g
        elif kind == "replace":
            wrong += max(to_e - from_e, to_g - from_g)
    return Differences(*(-int(-count // unit) for count in (lost, duplicate, wrong)))


def _repeats(got: Sequence[object], start: int, stop: int) -> bool:
    """Whether got[start:stop] stands right before or right behind itself."""
    piece, size = got[start:stop], stop - start
    return piece in (got[max(0, start - size) : start], got[stop : stop + size])


def is_usage_wrong(expected: Usage | None, got: Usage | None) -> bool:
    """Whether a token was charged too often or too rarely. Cached ones depend on who was asked."""
    if expected is None or got is None:
        return expected is not got
    return (expected.prompt_tokens, expected.completion_tokens) != (
        got.prompt_tokens,
        got.completion_tokens,
    )
