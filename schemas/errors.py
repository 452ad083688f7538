"""Every error that crosses a boundary of the mesh, in one tree.

MeshError
├── InvalidRequest            the caller's fault: says which parameter
│   ├── SchemaError           bytes that are no message of ours: says the path inside the message
│   ├── ContextTooLong
│   ├── SloUnreachable        its own computing alone takes longer than it is given
│   └── PayloadTooLarge
├── ModelNotFound
├── QueueFull                 a limit was reached; the same request may succeed later
│   └── OverBudget            the workers can't compute it in the time that it is given
├── BusUnavailable
├── NoCapacity                this process has no room now
├── KvLost                    blocks named by a handle can't be read any more
├── DeadlineExceeded
├── RequestCancelled
├── Poisoned                  several workers in a row made no progress with it
├── EngineFailed              the engine raised while it worked on this request
├── ModelUnsupported          at load: an architecture or folder that can't be served
└── ConfigError               at start: names the key
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it travels: enough to build the same exception on the other side."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class MeshError(Exception):
    """Root of the tree. ``code`` is stable and travels; ``message`` is for people.

    ``retry_after_s`` is when the same request may have better luck, where somebody can tell.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def info(self) -> ErrorInfo:
        """This error as a message field."""
        return ErrorInfo(
            code=self.code,
            message=self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
        )


class InvalidRequest(MeshError):
    """The caller asked for something that can't be: ``param`` names the field."""

    code = "invalid_request"
    http_status = 400


class SchemaError(InvalidRequest):
    """Bytes that do not decode to the expected message; ``param`` is the path inside it."""

    code = "schema_error"


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt and ``max_tokens`` together, exceed the model's context."""

    code = "context_length_exceeded"


class SloUnreachable(InvalidRequest):
    """No worker that is there could keep the request's times, had it nothing else to do."""

    code = "slo_unreachable"


class PayloadTooLarge(InvalidRequest):
    """A body or message over the limit that the receiver states."""

    code = "payload_too_large"
    http_status = 413


class ModelNotFound(MeshError):
    """No such model, revision or adapter is registered."""

    code = "model_not_found"
    http_status = 404


class QueueFull(MeshError):
    """A bounded queue is full."""

    code = "queue_full"
    http_status = 429
    retryable = True


class OverBudget(QueueFull):
    """The compute budget of its model is used up; ``retry_after_s`` is predicted from it."""

    code = "over_budget"


class BusUnavailable(MeshError):
    """The broker can't be reached, or did not confirm in time."""

    code = "bus_unavailable"
    http_status = 503
    retryable = True


class NoCapacity(MeshError):
    """No room in this process at this moment."""

    code = "no_capacity"
    http_status = 503
    retryable = True


class KvLost(MeshError):
    """The blocks behind a handle are gone, recycled or damaged; computing again helps."""

    code = "kv_lost"
    http_status = 503
    retryable = True


class DeadlineExceeded(MeshError):
    """The request's deadline passed before it ended."""

    code = "deadline_exceeded"
    http_status = 504


class RequestCancelled(MeshError):
    """The client left, or asked for the end."""

    code = "cancelled"
    http_status = 499


class ReaderTooSlow(MeshError):
    """More waited to be read than is kept for one reader."""

    code = "reader_too_slow"
    http_status = 408


class Poisoned(MeshError):
    """Several epochs in a row brought no new token; the request is in the dead letters."""

    code = "poisoned"
    http_status = 500


class EngineFailed(MeshError):
    """The engine raised while it worked on this request."""

    code = "engine_failed"
    http_status = 500


class ModelUnsupported(MeshError):
    """A model folder or architecture that this mesh can't serve; raised at load."""

    code = "model_unsupported"
    http_status = 500


class ConfigError(MeshError):
    """A setting that can't be used; ``param`` names its key."""

    code = "config_error"
    http_status = 500


def _all_subclasses(root: type[MeshError]) -> list[type[MeshError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _all_subclasses(child))]


BY_CODE: dict[str, type[MeshError]] = {cls.code: cls for cls in _all_subclasses(MeshError)}


def from_info(info: ErrorInfo) -> MeshError:
    """The exception behind ``info``; a code from a newer peer becomes a plain MeshError."""
    kind = BY_CODE.get(info.code, MeshError)
    return kind(info.message, param=info.param, retry_after_s=info.retry_after_s)
