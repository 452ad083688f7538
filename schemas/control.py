"""Life signs, quick words, orders to a process, and dead letters."""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.codec import Message
from schemas.profiles import StepCosts

ProcessState = Literal["starting", "ready", "draining", "gone"]


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How busy a worker is."""

    num_running: int = 0  # sequences in the running batch, or on their way into it with their KV
    num_waiting: int = 0  # taken, not running yet
    num_free_slots: int = 0  # how many more it would take now
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or cached and evictable
    waiting_tokens: int = 0  # prompt tokens not computed yet
    waiting_ms: float = 0.0  # how long they will take, by its own costs; 0 without
    context_tokens: int = 0  # of the sequences that decode, or come to, together
    age_ms: float = 0.0  # how long ago all this was so, but for the free slots: these are of now


class Beat(Message, frozen=True, kw_only=True, tag="beat/1"):
    """One heartbeat. ``process`` carries a boot nonce: the same one never comes back."""

    process: str
    kind: Literal["worker", "bridge", "control"]
    state: ProcessState
    host: str
    pid: int
    started_unix_ms: int
    health_port: int = 0
    worker: str = ""  # workers: the worker id in subjects
    roles: tuple[str, ...] = ()  # workers: "prefill", "decode"
    served: str = ""  # workers: <model@rev>
    engine: str = ""  # workers, for people: "native q4", "torch fp32", "simulated"
    fingerprint: str = ""  # workers: of the KV layout
    load: Load = Load()
    reason: str = ""  # why not ready
    max_sequence_tokens: int = 0  # workers: what prompt and answer together may be; 0: not said
    block_size: int = 0  # workers: tokens per KV block; 0: not said
    kv_seq: int = 0  # workers: number of the last KvEvents; 0: none was said
    costs: StepCosts | None = None  # workers: of its steps, as measured; None: not known
    profile: str = ""  # workers: the WorkerProfile that it began with
    kv_token_bytes: int = 0  # workers: bytes of keys and values of one token; 0: not said
    rack: str = ""  # workers: where it stands; "": not said
    zone: str = ""


class Placed(Message, frozen=True, kw_only=True, tag="placed/1"):
    """A router has given a request to a worker by name. Said to the other routers, so that they
    do not choose the same one before it says itself how busy it is."""

    process: str  # who placed it
    request_id: str
    served: str
    worker: str
    role: Literal["prefill", "decode"]
    prefill_ms: float = 0.0  # predicted; 0 for a decode, or without costs
    num_tokens: int = 0  # of KV that it will take there, at first
    there_ms: float = 0.0  # until the KV of a decode has come, predicted; 0 without costs


class CancelWord(Message, frozen=True, kw_only=True, tag="cancel-word/1"):
    """To a worker: the request ended on its chain, stop computing it."""

    request_id: str


class Adopt(Message, frozen=True, kw_only=True, tag="adopt/1"):
    """A bridge reads requests that another one submitted, or that lost their client.

    Said when it begins and with every beat while it lasts: silence is the end of it.
    """

    process: str
    request_ids: tuple[str, ...]


class Drain(Message, frozen=True, kw_only=True, tag="drain/1"):
    """To a process: finish what you have and leave, as after a SIGTERM.

    ``stay_down`` is for its supervisor: do not start it again.
    """

    process: str
    stay_down: bool = False


class DeadLetter(Message, frozen=True, kw_only=True, tag="dead-letter/1"):
    """A message that no stage could use, kept whole for a person to look at."""

    subject: str
    reason: str
    code: str
    payload: bytes
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    stage: str = ""
    process: str = ""
    unix_ms: int = 0
    payload_bytes: int = 0  # of the whole payload; what is over a limit was cut off
