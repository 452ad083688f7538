"""The bus: NATS with JetStream.

connection  one process's connection, endless         server       the embedded broker
client      what nats-py lacks for that                permissions  who may say and hear what
topology    streams, buckets, consumers                errors       what the bus adds to the tree
"""

from infra.bus.connection import Bus, BusSubscription, Msg
from infra.bus.errors import (
    BrokerRefused,
    BusForbidden,
    NobodyListens,
    ObjectMissing,
    WrongLastSequence,
)
from infra.bus.message import Stored, StoredMessage
from infra.bus.names import DEAD, MODELS, MODELS_BUCKET, OBJECTS, OBJECTS_BUCKET, TOKENS, WORK
from infra.bus.server import EmbeddedBroker
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
    "BrokerRefused",
    "Bus",
    "BusForbidden",
    "BusSubscription",
    "EmbeddedBroker",
    "Limits",
    "Msg",
    "NobodyListens",
    "ObjectMissing",
    "Stored",
    "StoredMessage",
    "WrongLastSequence",
    "admission_consumer",
    "any_consumer",
    "ensure_topology",
    "kv_ready_consumer",
    "worker_consumer",
]
