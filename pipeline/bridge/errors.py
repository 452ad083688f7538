"""What can go wrong on the HTTP side alone, beside the tree of ``schemas/errors.py``."""

from __future__ import annotations

from schemas.errors import InvalidRequest, MeshError, RequestCancelled


class UnknownPath(InvalidRequest):
    """No such address."""

    code = "unknown_url"
    http_status = 404


class MethodNotAllowed(InvalidRequest):
    """The address exists, the method does not; ``allowed`` lists those that do."""

    code = "method_not_allowed"
    http_status = 405

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestNotFound(InvalidRequest):
    """No such request is known to whoever asks: none was made, it is another tenant's, or it is
    older than what streams keep."""

    code = "request_not_found"
    http_status = 404


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class OriginRefused(InvalidRequest):
    """Pages of this origin may not call from a browser."""

    code = "origin_refused"
    http_status = 403


class ClientLeft(RequestCancelled):
    """The connection closed before the answer was complete: nobody is there to tell."""


class ShuttingDown(MeshError):
    """This bridge drains; another one, or this one a little later, would serve."""

    code = "shutting_down"
    http_status = 503
    retryable = True
