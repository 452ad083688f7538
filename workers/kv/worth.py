"""Whether a prefix is fetched or computed. Pure: figures in, a decision out.

A prefix is worth fetching when its bytes are here sooner than the model has computed it: the rule
that Mooncake (FAST'25, section 3 and 4) states as bandwidth over speed of computing. Both are
measured here, and what is fetched is bounded by what computing would have cost: a fetch that turns
out slow is given up after a known part of that.

    [0, here)          device or host memory: nothing to do
    [here, a) [a, b)   fetched: from disk, from another worker
    [b, prompt)        computed
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

DISK = "disk"  # the name of our own as a holder; others are called as their workers
WAIT_SHARE = 0.5  # of the computing that it saves: what a fetch may take, predicted and in fact
_KEEP = 0.8  # of the weight of what was seen before, with each new measurement
_MAX_LINKS = 256
# Before anything is measured.
_ASK_S = 5e-3
_BYTES_PER_S = 1e9


@dataclass(slots=True)
class _Link:
    """Sums over what was seen, the older the less. It starts as if it had been asked once, and
    had moved a megabyte."""

    asks: float = 1.0
    ask_s: float = _ASK_S
    bytes: float = 1e6
    read_s: float = 1e6 / _BYTES_PER_S

    def seconds(self, num_bytes: int) -> float:
        return self.ask_s / self.asks + num_bytes * self.read_s / self.bytes

    def observe(self, num_bytes: int, ask_s: float, read_s: float) -> None:
        self.asks = _KEEP * self.asks + 1
        self.ask_s = _KEEP * self.ask_s + ask_s
        self.bytes = _KEEP * self.bytes + num_bytes
        self.read_s = _KEEP * self.read_s + read_s


class LinkSpeeds:
    """How fast blocks come from each other worker. One worker is always read over the same
    transport, so its name stands for that, too.

    A link that failed is left alone for a while: its owner may be dead or frozen, and every
    request that tried would wait in vain.
    """

    def __init__(self) -> None:
        self._links: OrderedDict[str, _Link] = OrderedDict()  # last used last
        self._usual = _Link()  # all of them together, for those that were never read
        self._left_alone: dict[str, float] = {}  # until when

    def seconds(self, link: str, num_bytes: int) -> float:
        """How long so many bytes will take, from the question on."""
        return (self._links.get(link) or self._usual).seconds(num_bytes)

    def observe(self, link: str, num_bytes: int, ask_s: float, read_s: float) -> None:
        """They came: ``ask_s`` until it was clear what could be read, then ``read_s``."""
        self._left_alone.pop(link, None)
        known = self._links.get(link)
        if known is None:
            known = self._links[link] = _copy(self._usual)
            if len(self._links) > _MAX_LINKS:
                self._links.popitem(last=False)
        self._links.move_to_end(link)
        known.observe(num_bytes, ask_s, read_s)
        self._usual.observe(num_bytes, ask_s, read_s)

    def fail(self, link: str, until_s: float) -> None:
        """Nothing came: leave it alone until then."""
        self._left_alone[link] = until_s
        if len(self._left_alone) > _MAX_LINKS:
            del self._left_alone[next(iter(self._left_alone))]

    def is_left_alone(self, link: str, now_s: float) -> bool:
        """Whether it failed a moment ago."""
        return now_s < self._left_alone.get(link, now_s)


def _copy(link: _Link) -> _Link:
    return _Link(link.asks, link.ask_s, link.bytes, link.read_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has the first ``num_blocks`` blocks of a prompt; ``seconds`` says how long so many of
    them will take from there."""

    name: str
    num_blocks: int
    seconds: Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Blocks ``[start, end)`` of a prompt are fetched from ``holder``.

    ``predicted_s`` is how long that will take, ``limit_s`` after how long computing is better.
    """

    holder: str
    start: int
    end: int
    predicted_s: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A prompt: its first ``num_here`` blocks are here, up to ``num_usable`` could be used.
    ``computing`` says how long the positions ``[start, end)`` would take."""

    num_here: int
    num_usable: int
    num_tokens: int
    block_size: int
    computing: Callable[[int, int], float]


def plan(need: Need, holders: Sequence[Holder]) -> tuple[Fetch, ...]:
    """What to fetch, in order, so that the prompt is ready soonest; nothing, when computing is.

    Every fetch is predicted to take at most :data:`WAIT_SHARE` of the computing that it saves.
    """
    best: tuple[Fetch, ...] = ()
    best_s = _total_s(need, best)
    for fetches in _candidates(need, holders):
        total_s = _total_s(need, fetches)
        if total_s < best_s and all(fetch.predicted_s <= fetch.limit_s for fetch in fetches):
            best, best_s = fetches, total_s
    return best


def _candidates(need: Need, holders: Sequence[Holder]) -> Iterator[tuple[Fetch, ...]]:
    """One holder alone, and what one has beyond the disk after what the disk has."""
    for holder in holders:
        alone = _fetch(need, holder, need.num_here)
        if alone is None:
            continue
        yield (alone,)
        if holder.name == DISK:
            beyond = (_fetch(need, other, alone.end) for other in holders)
            yield from ((alone, more) for more in beyond if more is not None)


def _fetch(need: Need, holder: Holder, start: int) -> Fetch | None:
    end = min(holder.num_blocks, need.num_usable)
    if end <= start:
        return None
    size = need.block_size
    return Fetch(
        holder=holder.name,
        start=start,
        end=end,
        predicted_s=holder.seconds(end - start),
        limit_s=WAIT_SHARE * need.computing(start * size, end * size),
    )


def _total_s(need: Need, fetches: Sequence[Fetch]) -> float:
    ready = fetches[-1].end if fetches else need.num_here
    computing_s = need.computing(ready * need.block_size, need.num_tokens)
    return computing_s + sum(fetch.predicted_s for fetch in fetches)
