"""The bridge's bounds on size, number and time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes, counts and seconds."""

    max_body_bytes: int = 4 * 2**20
    max_open_requests: int = 4096
    body_s: float = 30.0  # for a body to arrive
    accept_s: float = 10.0  # for admission to decide
    default_deadline_s: float = 300.0
    max_deadline_s: float = 780.0
    late_s: float = 1.0  # past its deadline a request is ended here, whatever the mesh does
    keep_alive_s: float = 10.0  # silence after which a stream gets a comment
    replay_s: float = 60.0  # for a stream that has ended to be handed over once more
    stall_s: float = 30.0  # a client that takes nothing for so long is gone
    retry_after_s: int = 1  # what a client is told that may try again
