"""What the bus adds to the mesh's errors.

MeshError
├── BusUnavailable
│   ├── NobodyListens      the subject has no subscriber and no stream (consumer gone, no leader)
│   └── AnotherInFlight    a replicated stream is just storing another message of the subject
├── WrongLastSequence      a compare-and-set lost
├── BusForbidden           the broker user may not do this
├── ObjectMissing          an object named by a message is not (or no longer) in the store
└── BrokerRefused          any other answer of the JetStream API that is an error
"""

from __future__ import annotations

from typing import Any

from schemas.errors import BusUnavailable, MeshError, PayloadTooLarge, QueueFull

_WRONG_LAST_SEQUENCE = 10071
_IN_FLIGHT = 10164
_FULL = 10077
_TOO_LARGE = 10054
_SHORT_OF_RESOURCES = (10023, 10047, 10167)
_NO_LEADER = 10008  # of a cluster that has just lost a server: "temporarily unavailable"


class NobodyListens(BusUnavailable):
    """Nothing answers on this subject: no subscriber, no consumer, or no leader at the moment."""


class AnotherInFlight(BusUnavailable):
    """Not stored: whether a compare-and-set would win is not known yet, on a replicated stream."""


class WrongLastSequence(MeshError):
    """The subject's last message isn't the expected one; nothing was stored.

    ``last_seq`` is the one it is, as the broker said.
    """

    code = "wrong_last_sequence"

    def __init__(self, message: str, *, last_seq: int = 0) -> None:
        super().__init__(message)
        self.last_seq = last_seq


class BusForbidden(MeshError):
    """The broker's permissions refuse this subject to our user."""

    code = "bus_forbidden"
    http_status = 403


class ObjectMissing(MeshError):
    """The object is not in the store: never put, or older than the store keeps them."""

    code = "object_missing"


class BrokerRefused(MeshError):
    """The JetStream API answered with an error; ``err_code`` is the broker's own number."""

    code = "broker_refused"

    def __init__(self, message: str, *, err_code: int, status: int) -> None:
        super().__init__(message)
        self.err_code = err_code
        self.status = status


def from_answer(error: dict[str, Any], about: str) -> MeshError:
    """The exception behind the ``error`` object of a JetStream answer about ``about``."""
    err_code, status = int(error.get("err_code", 0)), int(error.get("code", 0))
    text = f"{about}: {error.get('description', 'no description')} ({err_code})"
    if err_code == _WRONG_LAST_SEQUENCE:
        return WrongLastSequence(text, last_seq=_named_seq(error))
    if err_code == _IN_FLIGHT:
        return AnotherInFlight(text)
    if err_code == _FULL:
        return QueueFull(text)
    if err_code == _TOO_LARGE:
        return PayloadTooLarge(text)
    if err_code in _SHORT_OF_RESOURCES or err_code == _NO_LEADER:
        return BusUnavailable(text)
    return BrokerRefused(text, err_code=err_code, status=status)


def _named_seq(error: dict[str, Any]) -> int:
    """The number at the end of "wrong last sequence: 57"; 0 when there is none."""
    number = str(error.get("description", "")).rpartition(":")[2].strip()
    return int(number) if number.isdecimal() else 0
