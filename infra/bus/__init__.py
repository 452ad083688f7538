"""The bus: NATS with JetStream.

connection    one process's connection, endless      topology     streams, buckets, consumers
client        what nats-py lacks for that            server       the embedded broker
pull          taking work                            permissions  who may say and hear what
token_writer  writing tokens, none lost               reaper       a dead worker's queue
stream_reader following tokens in stream order       objects      payloads too large to send
replay        reading what a stream holds            peek         looking into the work queue
errors        what the bus adds to the tree          direct       work said without the queue
"""

from infra.bus.connection import Bus, BusSubscription, Msg
from infra.bus.direct import BeforeQueue, DirectMessage
from infra.bus.errors import (
    BrokerRefused,
    BusForbidden,
    NobodyListens,
    ObjectMissing,
    WrongLastSequence,
)
from infra.bus.message import Stored, StoredMessage
from infra.bus.names import DEAD, MODELS, MODELS_BUCKET, OBJECTS, OBJECTS_BUCKET, TOKENS, WORK
from infra.bus.objects import ObjectBox, load_payload, publish_work
from infra.bus.peek import drop, peek
from infra.bus.pull import WorkMessage, WorkPull
from infra.bus.reaper import Placement, next_attempt, reap, redeliver, waiting_work
from infra.bus.replay import end_of_stream, replay
from infra.bus.server import EmbeddedBroker
from infra.bus.stream_reader import StreamReader
from infra.bus.token_writer import TokenWriter
from infra.bus.topology import (
    Limits,
    admission_consumer,
    any_consumer,
    ensure_topology,
    kv_ready_consumer,
    worker_consumer,
)

__all__ = [
    "DEAD",
    "MODELS",
    "MODELS_BUCKET",
    "OBJECTS",
    "OBJECTS_BUCKET",
    "TOKENS",
    "WORK",
    "BeforeQueue",
    "BrokerRefused",
    "Bus",
    "BusForbidden",
    "BusSubscription",
    "DirectMessage",
    "EmbeddedBroker",
    "Limits",
    "Msg",
    "NobodyListens",
    "ObjectBox",
    "ObjectMissing",
    "Placement",
    "Stored",
    "StoredMessage",
    "StreamReader",
    "TokenWriter",
    "WorkMessage",
    "WorkPull",
    "WrongLastSequence",
    "admission_consumer",
    "any_consumer",
    "drop",
    "end_of_stream",
    "ensure_topology",
    "kv_ready_consumer",
    "load_payload",
    "next_attempt",
    "peek",
    "publish_work",
    "reap",
    "redeliver",
    "replay",
    "waiting_work",
    "worker_consumer",
]
