"""Requests as a cache of KV blocks sees them: synthetic, the same for the same seed.

    chats       shared system prompts; conversations of several turns, most short and some very
                long, whose users think for a while or for long
    mixed       chats, and every fourth request a long prompt that never comes again
    agents      few conversations of many quick turns
    documents   questions about documents, some asked about often, most once
    drift       documents whose popularity fades while others come up
    loop        the same documents one after the other, more than fit

Each kind knows of one trait of public traces (Mooncake, FAST'25: more than half of the blocks are
used once; conversations come back over minutes to hours).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workers.kv.api import BlockName

_ROOT = bytes(16)


@dataclass(frozen=True, slots=True)
class Request:
    """The first ``num_prompt`` of ``blocks`` are asked for; all are there afterwards."""

    blocks: list[
        BlockName
    ]  # shared with later requests of the chat: the first ``num_blocks`` count
    num_prompt: int
    num_blocks: int


class _Maker:
    """Makes blocks that nobody has made before."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._numbers = itertools.count(1)

    def extend(self, chain: list[BlockName], count: int) -> None:
        for _ in range(count):
            parent = chain[-1].block_hash if chain else _ROOT
            chain.append(BlockName(block_hash=next(self._numbers).to_bytes(16), parent=parent))

    def chain(self, count: int, start: list[BlockName] | None = None) -> list[BlockName]:
        made = list(start or ())
        self.extend(made, count)
        return made

    def length(self, median: float, spread: float = 0.8) -> int:
        """Lognormal, at least 1."""
        return max(1, round(self.rng.lognormvariate(0, spread) * median))

    def rank(self, num: int) -> int:
        """Zipf over 0 to num - 1, nearly: exponent 1."""
        return min(num - 1, int(num ** self.rng.random()) - 1)


def _conversations(
    maker: _Maker,
    num_requests: int,
    *,
    num_systems: int,
    goes_on: Callable[[], float],
    think: Callable[[], float],
    scans: float = 0.0,
) -> Iterator[Request]:
    """``goes_on``: a chat's chance of another turn; ``think``: requests of others until then;
    ``scans``: the share of requests that nobody sends again."""
    rng = maker.rng
    systems = [maker.chain(maker.length(16)) for _ in range(num_systems)]
    waiting: list[tuple[float, int, float, list[BlockName]]] = []
    for now in range(num_requests):
        if rng.random() < scans:
            scan = maker.chain(maker.length(48))
            yield Request(scan, len(scan), len(scan))
            continue
        if waiting and waiting[0][0] <= now:
            _, _, chance, chat = heapq.heappop(waiting)
        else:
            chance, chat = goes_on(), list(systems[maker.rank(num_systems)])
        maker.extend(chat, maker.length(2))
        num_prompt = len(chat)
        maker.extend(chat, maker.length(5))
        yield Request(chat, num_prompt, len(chat))
        if rng.random() < chance:
            heapq.heappush(waiting, (now + think(), now, chance, chat))


def _chats(maker: _Maker, num_requests: int, scans: float = 0.0) -> Iterator[Request]:
    rng = maker.rng
    return _conversations(
        maker,
        num_requests,
        num_systems=20,
        goes_on=lambda: rng.betavariate(1.5, 1.0),
        think=lambda: rng.lognormvariate(4.0, 1.5),
        scans=scans,
    )


def _agents(maker: _Maker, num_requests: int) -> Iterator[Request]:
    rng = maker.rng
    return _conversations(
        maker,
        num_requests,
        num_systems=4,
        goes_on=lambda: 0.96,
        think=lambda: rng.lognormvariate(2.5, 1.0),
    )


def _documents(maker: _Maker, num_requests: int, drift: float = 0.0) -> Iterator[Request]:
    """``drift``: ranks by which all documents fall per request."""
    num = 400
    documents = [maker.chain(maker.length(24)) for _ in range(num)]
    for now in range(num_requests):
        if drift and now % round(1 / drift) == 0:
            documents.insert(0, maker.chain(maker.length(24)))
            documents.pop()
        if maker.rng.random() < 0.3:
            document = maker.chain(maker.length(24))  # somebody's own
        else:
            document = documents[maker.rank(num)]
        prompt = maker.chain(maker.length(2), document)
        yield Request(prompt, len(prompt), len(prompt))


def _loop(maker: _Maker, num_requests: int) -> Iterator[Request]:
    documents = [maker.chain(maker.length(24)) for _ in range(200)]
    for document in itertools.islice(itertools.cycle(documents), num_requests):
        yield Request(document, len(document), len(document))


_KINDS: dict[str, Callable[[_Maker, int], Iterator[Request]]] = {
    "mixed": lambda maker, num: _chats(maker, num, scans=0.25),
    "chats": _chats,
    "agents": _agents,
    "documents": _documents,
    "drift": lambda maker, num: _documents(maker, num, drift=0.05),
    "loop": _loop,
}
KINDS = tuple(_KINDS)


def make_trace(kind: str, seed: int, num_requests: int) -> list[Request]:
    """``num_requests`` requests of one of ``KINDS``."""
    return list(_KINDS[kind](_Maker(seed), num_requests))


def working_set(trace: list[Request]) -> int:
    """How many blocks there are in all."""
    return len({block.block_hash for request in trace for block in request.blocks})
