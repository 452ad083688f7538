"""Subject names: the only place that turns model names and ids into subject tokens and back.

    mesh.v1.admission.<model>                        InferenceRequest
    mesh.v1.prefill.<model@rev>.<worker|any>         PrefillTask
    mesh.v1.kv-ready.<model@rev>                     KvReady
    mesh.v1.decode.<model@rev>.<worker|any>          DecodeTask
    mesh.v1.request.<id>                             RequestRecord
    mesh.v1.token-stream.<reader>.tokens             TokenBatch, Accepted
    mesh.v1.token-stream.<reader>.claim.<id>         the claim chain of one request
    mesh.v1.live.token-stream.<reader>.>             both of the above, republished in stream order
    mesh.v1.direct.admission.<model>                 InferenceRequest, without the queue
    mesh.v1.direct.prefill.<model@rev>.<worker>      PrefillTask, without the queue
    mesh.v1.cancel.<worker>                          CancelWord
    mesh.v1.lease.<worker>                           LeaseRelease, LeaseRenew
    mesh.v1.kv-lend.<worker>                         KvLend; the answer is KvLent
    mesh.v1.kv-events.<model@rev>.<worker>           KvEvents
    mesh.v1.kv-snapshot.<worker>                     KvSnapshotAsk (a question)
    mesh.v1.beat.<process>                           Beat
    mesh.v1.placed.<process>                         Placed
    mesh.v1.adopt.<process>                          Adopt
    mesh.v1.control.<process>                        Drain
    mesh.v1.tokenize.<model>                         Tokenize, Detokenize (questions)
    mesh.v1.dead                                     DeadLetter

A ``<reader>`` is two tokens, ``<broker user>.<name>``: permissions know subjects only, so the
user in front is what keeps one client from reading another's stream. Tokens have a subject below
the reader, beside the chains, so that one filter (:func:`reader_filter`) covers all that a reader
needs, in one order.

What lies under ``direct`` is the queue's own message, headers and all, said without being stored.
Whoever hears it takes it at once or puts it into the queue; who said it puts it there when nobody
hears it, or nothing comes of it. Until something does, nothing has been promised to anybody.
"""

from __future__ import annotations

import re
from functools import lru_cache

from schemas.errors import SchemaError

ROOT = "mesh.v1"
ANY = "any"
_BRIDGE = "bridge"
_DIRECT = f"{ROOT}.direct."

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_MAX_NAME = 512  # encoded; the broker drops a connection whose subjects are over 4 KiB
_TOKEN = re.compile(r"[A-Za-z0-9_=@-]{1,255}\Z")
_SERVED = re.compile(rf"[A-Za-z0-9_=-]{{1,{_MAX_NAME}}}@[A-Za-z0-9_=-]{{1,{_MAX_NAME}}}\Z")
_READER = re.compile(r"[A-Za-z0-9_-]{1,64}\.[A-Za-z0-9_-]{1,64}\Z")
_ID = re.compile(r"[A-Za-z0-9_-]{8,64}\Z")


@lru_cache(256)
def encode_name(name: str) -> str:
    """A model name as one subject token (also a legal KV key): other bytes become ``=XX``.

    Raises:
        SchemaError: it is empty, too long for a subject, or no Unicode text.
    """
    try:
        token = "".join(
            c if c in _PLAIN else "".join(f"={byte:02X}" for byte in c.encode()) for c in name
        )
    except UnicodeEncodeError as error:
        raise SchemaError("a name must be Unicode text", param="model") from error
    if not 0 < len(token) <= _MAX_NAME:
        raise SchemaError(f"a name has 1 to {_MAX_NAME} characters, encoded", param="model")
    return token


@lru_cache(256)
def decode_name(token: str) -> str:
    """The inverse of :func:`encode_name`; SchemaError for what that never gives."""
    out = bytearray()
    i = 0
    try:
        while i < len(token):
            if token[i] == "=":
                out.append(int(token[i + 1 : i + 3], 16))
                i += 3
            else:
                out += token[i].encode()
                i += 1
        name = out.decode()
    except ValueError as error:
        raise SchemaError(f"subject token {token!r} is no encoded name", param="subject") from error
    if not name or encode_name(name) != token:
        raise SchemaError(f"subject token {token!r} is no encoded name", param="subject")
    return name


def served(model: str, revision: str) -> str:
    """The subject token ``<model@rev>`` under which one revision is served."""
    return f"{encode_name(model)}@{encode_name(revision)}"


@lru_cache(256)
def split_served(token: str) -> tuple[str, str]:
    """Model name and revision behind a ``<model@rev>`` token."""
    model, at, revision = token.partition("@")
    if not at:
        raise SchemaError(f"{token!r} names no revision", param="subject")
    return decode_name(model), decode_name(revision)


def check_request_id(request_id: str) -> str:
    """``request_id`` itself when it can stand in a subject."""
    if not _ID.match(request_id):
        raise SchemaError(
            "a request id is 8 to 64 of the characters A-Z a-z 0-9 _ -", param="request_id"
        )
    return request_id


@lru_cache(256)
def check_reader(reader: str) -> str:
    """``reader`` itself when it has the form ``<broker user>.<name>``."""
    if not _READER.match(reader):
        raise SchemaError("a reader is '<broker user>.<name>'", param="reader")
    return reader


def bridge_reader(process: str) -> str:
    """The reader of one bridge, whatever its broker user is called."""
    return check_reader(f"{_BRIDGE}.{process}")


def bridge_of(reader: str) -> str | None:
    """The process id of the bridge whose reader this is; None for any other reader."""
    user, _, process = reader.partition(".")
    return process if user == _BRIDGE else None


def default_reader(request_id: str) -> str:
    """Where the tokens of a request go that names no reader."""
    return f"client.{check_request_id(request_id)}"


def _served(token: str) -> str:
    if not _SERVED.match(token):
        raise SchemaError(f"{token!r} is no <model@rev>", param="served")
    return token


def _worker(worker: str) -> str:
    if not _TOKEN.match(worker):
        raise SchemaError(f"{worker!r} is no worker id", param="worker")
    return worker


def admission(model: str) -> str:
    """Where requests for ``model`` enter."""
    return f"{ROOT}.admission.{encode_name(model)}"


def prefill(served_model: str, worker: str = ANY) -> str:
    """Prefill tasks for one worker, or for whoever pulls first."""
    return f"{ROOT}.prefill.{_served(served_model)}.{_worker(worker)}"


def kv_ready(served_model: str) -> str:
    """Where finished prefills are announced."""
    return f"{ROOT}.kv-ready.{_served(served_model)}"


def decode(served_model: str, worker: str = ANY) -> str:
    """Decode tasks for one worker, or for whoever pulls first."""
    return f"{ROOT}.decode.{_served(served_model)}.{_worker(worker)}"


def request_record(request_id: str) -> str:
    """The admitted request, written once."""
    return f"{ROOT}.request.{check_request_id(request_id)}"


def token_stream(reader: str) -> str:
    """Tokens for one reader."""
    return f"{ROOT}.token-stream.{check_reader(reader)}.tokens"


def chain(reader: str, request_id: str) -> str:
    """The claim chain of one request."""
    return f"{ROOT}.token-stream.{check_reader(reader)}.claim.{check_request_id(request_id)}"


def reader_filter(reader: str) -> str:
    """Everything stored for one reader: its tokens and its requests' chains."""
    return f"{ROOT}.token-stream.{check_reader(reader)}.>"


def live(subject: str) -> str:
    """Where the broker republishes ``subject``, in stream order."""
    return f"{ROOT}.live.{subject.removeprefix(ROOT + '.')}"


def stored(live_subject: str) -> str:
    """The stream's own subject behind a republished one (a stored subject is kept)."""
    return f"{ROOT}.{live_subject.removeprefix(ROOT + '.').removeprefix('live.')}"


def direct(queued: str) -> str:
    """Where the work message of ``queued`` is said without the queue."""
    return f"{_DIRECT}{queued.removeprefix(ROOT + '.')}"


def queued(direct_subject: str) -> str:
    """The queue's subject behind a direct one (a queue's own is kept)."""
    if not direct_subject.startswith(_DIRECT):
        return direct_subject
    return f"{ROOT}.{direct_subject.removeprefix(_DIRECT)}"


def split_stream_subject(subject: str) -> tuple[str, str | None]:
    """Reader, and the request id when the subject is a claim chain, of a stored or live subject."""
    parts = subject.split(".")
    if len(parts) > 2 and parts[2] == "live":
        del parts[2]
    if len(parts) == 6 and parts[2] == "token-stream" and parts[5] == "tokens":
        return f"{parts[3]}.{parts[4]}", None
    if len(parts) == 7 and parts[2] == "token-stream" and parts[5] == "claim":
        return f"{parts[3]}.{parts[4]}", parts[6]
    raise SchemaError(f"{subject!r} is no token stream", param="subject")


def split_work(subject: str) -> tuple[str, str, str | None]:
    """Stage, model token and worker (None where the stage has none) of a work subject."""
    parts = subject.split(".")
    if len(parts) == 5 and parts[2] in ("prefill", "decode"):
        return parts[2], parts[3], parts[4]
    if len(parts) == 4 and parts[2] in ("admission", "kv-ready"):
        return parts[2], parts[3], None
    raise SchemaError(f"{subject!r} is no work subject", param="subject")


def cancel(worker: str) -> str:
    """The quick word to a worker that a request ended."""
    return f"{ROOT}.cancel.{_worker(worker)}"


def lease(worker: str) -> str:
    """Releases and renewals of the leases that a worker gave."""
    return f"{ROOT}.lease.{_worker(worker)}"


def kv_lend(worker: str) -> str:
    """Questions to a worker for blocks that it may lend; answers go to their reply subjects."""
    return f"{ROOT}.kv-lend.{_worker(worker)}"


def kv_events(served_model: str, worker: str) -> str:
    """What changes in the tiers of one worker."""
    return f"{ROOT}.kv-events.{_served(served_model)}.{_worker(worker)}"


def kv_snapshot(worker: str) -> str:
    """Questions to one worker: what its tiers hold. Answers go to their reply subjects."""
    return f"{ROOT}.kv-snapshot.{_worker(worker)}"


def beat(process: str) -> str:
    """Heartbeats of one process."""
    return f"{ROOT}.beat.{_worker(process)}"


def adopt(process: str) -> str:
    """Requests that one bridge reads although they came through another."""
    return f"{ROOT}.adopt.{_worker(process)}"


def placed(process: str) -> str:
    """What one router gives to workers by name, for the other routers."""
    return f"{ROOT}.placed.{_worker(process)}"


def control(process: str) -> str:
    """Orders to one process."""
    return f"{ROOT}.control.{_worker(process)}"


def tokenize(model: str) -> str:
    """Questions to the tokenizer of ``model``; answers go to their reply subjects."""
    return f"{ROOT}.tokenize.{encode_name(model)}"


DEAD = f"{ROOT}.dead"
ALL_ADMISSION = f"{ROOT}.admission.*"
ALL_CHAINS = f"{ROOT}.token-stream.*.*.claim.*"
ALL_BEATS = f"{ROOT}.beat.*"
ALL_KV_EVENTS = f"{ROOT}.kv-events.*.*"
ALL_TOKENIZE = f"{ROOT}.tokenize.*"
ALL_PLACED = f"{ROOT}.placed.*"
ALL_ADOPTIONS = f"{ROOT}.adopt.*"
ALL_ORDERS = f"{ROOT}.control.*"
