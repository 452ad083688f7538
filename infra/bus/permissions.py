"""Who may say and hear what on the bus: one broker user per role.

A client user's name is the first token of its readers, so its permissions end at its own streams.
The right to make consumers on a stream is the right to read it; a client's is narrowed to filters
below its own name (the broker refuses a consumer whose filter differs from the subject of the
call). It can still have its own entries delivered to any subject: give a client user to parties
you would let publish work, and put strangers behind the bridge.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.bus.names import DEAD, MODELS, MODELS_BUCKET, OBJECTS, OBJECTS_BUCKET, TOKENS, WORK
from schemas.subjects import ROOT

_API = "$JS.API"
_CLOCK = f"{_API}.STREAM.INFO.{DEAD}"
_READ_TOKENS = (
    f"{_API}.CONSUMER.CREATE.{TOKENS}.>",
    f"{_API}.CONSUMER.DELETE.{TOKENS}.*",
    f"{_API}.DIRECT.GET.{TOKENS}",
    f"{_API}.DIRECT.GET.{TOKENS}.>",
    "$JS.FC.>",
)
_READ_MODELS = (
    f"{_API}.STREAM.INFO.{MODELS}",
    f"{_API}.DIRECT.GET.{MODELS}.>",
    f"{_API}.CONSUMER.CREATE.{MODELS}.>",
    f"{_API}.CONSUMER.DELETE.{MODELS}.*",
)
_READ_OBJECTS = (
    f"{_API}.DIRECT.GET.{OBJECTS}.>",
    f"{_API}.CONSUMER.CREATE.{OBJECTS}.>",
    f"{_API}.CONSUMER.DELETE.{OBJECTS}.*",
)
_PUT_OBJECTS = (f"$O.{OBJECTS_BUCKET}.>",)


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects a user may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool = False  # one answer to each question it receives


CONTROL = Permissions(
    # To its own inbox: whether it hears the bus (``pipeline/presence.py``).
    publish=(
        f"{ROOT}.>",
        f"{_API}.>",
        "$JS.ACK.>",
        "$JS.FC.>",
        "$KV.>",
        "$O.>",
        "_INBOX_control.>",
    ),
    subscribe=(f"{ROOT}.>", "$KV.>", "$JS.EVENT.ADVISORY.>", "_INBOX_control.>"),
    may_answer=True,
)

WORKER = Permissions(
    publish=(
        *(f"{ROOT}.{name}.>" for name in ("prefill", "kv-ready", "decode", "token-stream")),
        *(f"{ROOT}.{name}.>" for name in ("lease", "kv-lend", "cancel", "beat", "kv-events")),
        f"{ROOT}.request.*",
        f"{ROOT}.trace.>",
        f"{ROOT}.dead",
        f"$JS.ACK.{WORK}.>",
        f"{_API}.CONSUMER.MSG.NEXT.{WORK}.>",
        f"{_API}.CONSUMER.INFO.{WORK}.>",
        f"{_API}.CONSUMER.CREATE.{WORK}.*.{ROOT}.prefill.>",
        f"{_API}.CONSUMER.CREATE.{WORK}.*.{ROOT}.decode.>",
        _CLOCK,
        *_READ_TOKENS,
        *_READ_MODELS,
        *_READ_OBJECTS,
        *_PUT_OBJECTS,
    ),
    subscribe=(
        *(f"{ROOT}.{name}.>" for name in ("lease", "kv-lend", "cancel", "beat", "control")),
        *(f"{ROOT}.{name}.>" for name in ("kv-events", "kv-snapshot", "direct.prefill")),
        f"{ROOT}.live.>",
        "_INBOX_worker.>",
    ),
    may_answer=True,
)

BRIDGE = Permissions(
    publish=(
        f"{ROOT}.admission.>",
        f"{ROOT}.direct.admission.>",
        f"{ROOT}.tokenize.*",
        f"{ROOT}.cancel.>",
        f"{ROOT}.beat.>",
        f"{ROOT}.adopt.>",
        f"{ROOT}.token-stream.*.*.claim.*",
        f"{ROOT}.dead",
        _CLOCK,
        *_READ_TOKENS,
        *_READ_MODELS,
        *_PUT_OBJECTS,
    ),
    subscribe=(
        *(f"{ROOT}.{name}.>" for name in ("live", "token-stream", "beat", "control")),
        f"{ROOT}.adopt.>",
        f"$KV.{MODELS_BUCKET}.>",
        "_INBOX_bridge.>",
    ),
)


def client(user: str, *, uses_default_inbox: bool = False) -> Permissions:
    """A client's permissions; ``user`` is the first token of all its readers.

    ``uses_default_inbox``: also hears ``_INBOX.>``, where any NATS program expects its answers.
    At most one user may: who hears it hears all that arrives there.
    """
    own = f"{ROOT}.token-stream.{user}"
    inboxes = (f"_INBOX_{user}.>", *(("_INBOX.>",) if uses_default_inbox else ()))
    return Permissions(
        publish=(
            f"{ROOT}.admission.>",
            f"{ROOT}.tokenize.*",
            f"{own}.*.claim.*",
            _CLOCK,
            f"{_API}.CONSUMER.CREATE.{TOKENS}.*.{own}.>",
            f"{_API}.CONSUMER.DELETE.{TOKENS}.*",
            f"{_API}.DIRECT.GET.{TOKENS}.{own}.>",
            "$JS.FC.>",
            *_READ_MODELS,
            *_PUT_OBJECTS,
        ),
        subscribe=(f"{own}.>", f"{ROOT}.live.token-stream.{user}.>", *inboxes),
    )
