"""One step's view of the KV pool: where its tokens are written, and what each query reads.

The packed batch is one row of tokens, spans of one token (decodes) first::

    [0, num_decodes)          one token each, longest sequence first
    [num_decodes, num_tokens) chunks of prompts, one span after the other

transformers' modules get a :class:`PagedStep` as their cache. Everything that does not depend on
the layer is computed once per step; layers differ by one added offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.engine.attention import Scoring, attend
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool
from workers.engine.paged_cache import PagedCache

_NO_WINDOW = 1 << 30  # more tokens than any sequence has
_TILE = 128  # queries of a chunk attended at once; 78 ms against 125 for whole-chunk SDPA at 512


@dataclass(frozen=True, slots=True)
class Span:
    """A sequence's share of the packed batch: positions ``[start, start + count)``."""

    block_table: Sequence[int]
    start: int
    count: int

    @property
    def end(self) -> int:
        """How many tokens the sequence has in the cache after this step."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar length, attended together; padding at most doubles what one reads.

    ``tokens`` are rows of the packed batch; ``mask`` is [n, 1, 1, 1, num_keys], 0 or -inf.
    """

    tokens: slice
    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A span of several tokens; its keys begin at position ``first_key``."""

    tokens: slice
    start: int
    first_key: int
    rows: Tensor | None  # None: the chunk sees only itself, nothing has to be gathered


class PagedStep(PagedCache):
    """What a model's attention layers need to know about one packed batch.

    Args:
        spans: spans of one token first, longest sequence first; then the others.
    """

    def __init__(self, pool: KvPool, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.num_decodes = sum(span.count == 1 for span in spans)
        self._tables = [np.asarray(span.block_table, np.int64) for span in spans]
        self._groups: dict[int, list[DecodeGroup]] = {}
        self._chunks: dict[int, list[Chunk]] = {}
        super().__init__(pool, _rows_to_write(pool.layout, spans, self._tables))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of the layer whose update came last; shapes as in ``paged_attention``.

        Raises:
            ModelUnsupported: a layer attends to what another layer wrote.
        """
        layer = self.take_written_layer()
        _, num_heads, num_tokens, head_dim = query.shape
        out = query.new_empty(num_tokens, num_heads, head_dim)
        for group in self.decode_groups(scoring.window):
            keys, values = self.pool.gather(group.rows, layer)
            out[group.tokens] = _attend_decodes(group, query[0], keys, values, scoring)
        for chunk in self.chunks(scoring.window):
            tokens = chunk.tokens
            if chunk.rows is None:
                keys, values = key[:, :, tokens], value[:, :, tokens]
            else:
                keys, values = self.pool.gather(chunk.rows, layer)
            _attend_chunk(chunk, query[0, :, tokens], keys, values, scoring, out[tokens])
        return out[None]

    def decode_groups(self, window: int | None) -> list[DecodeGroup]:
        """The decodes, for layers that see the last ``window`` tokens (None: all)."""
        window = window or _NO_WINDOW
        if window not in self._groups:
            self._groups[window] = [self._group(s, window) for s in self._similar_decodes()]
        return self._groups[window]

    def chunks(self, window: int | None) -> list[Chunk]:
        """The spans of several tokens, for layers that see the last ``window`` tokens."""
        window = window or _NO_WINDOW
        if window not in self._chunks:
            self._chunks[window] = self._make_chunks(window)
        return self._chunks[window]

    def _similar_decodes(self) -> Iterator[slice]:
        """Runs of decodes of which the first is at most twice as long as the last."""
        first = 0
        for number in range(1, self.num_decodes + 1):
            is_last = number == self.num_decodes
            if is_last or self.spans[number].end * 2 < self.spans[first].end:
                yield slice(first, number)
                first = number

    def _group(self, tokens: slice, window: int) -> DecodeGroup:
        block_size = self.pool.layout.block_size
        ends = np.array([span.end for span in self.spans[tokens]])
        first_blocks = np.maximum(ends - window, 0) // block_size
        num_blocks = int((-(-ends // block_size) - first_blocks).max())
        blocks = np.stack(
            [
                _padded(table[first : first + num_blocks], num_blocks)
                for table, first in zip(self._tables[tokens], first_blocks, strict=True)
            ]
        )
        keys = first_blocks[:, None] * block_size + np.arange(num_blocks * block_size)
        visible = (keys < ends[:, None]) & (keys >= ends[:, None] - window)
        mask = _additive(visible)[:, None, None, None]
        return DecodeGroup(tokens, torch.from_numpy(_head_rows(self.pool.layout, blocks)), mask)

    def _make_chunks(self, window: int) -> list[Chunk]:
        block_size = self.pool.layout.block_size
        chunks: list[Chunk] = []
        at = self.num_decodes
        for span, table in zip(
            self.spans[self.num_decodes :], self._tables[self.num_decodes :], strict=True
        ):
            tokens, at = slice(at, at + span.count), at + span.count
            if span.start == 0:
                chunks.append(Chunk(tokens, 0, 0, None))
                continue
            first = max(0, span.start + 1 - window) // block_size
            rows = _head_rows(self.pool.layout, table[None, first : -(-span.end // block_size)])
            chunks.append(Chunk(tokens, span.start, first * block_size, torch.from_numpy(rows)))
        return chunks


def _head_rows(layout: KvLayout, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rows of ``KvPool.heads`` for the keys of layer 0: [n, num_kv_heads, num_blocks] for blocks
    [n, num_blocks]."""
    first = blocks * (layout.num_layers * 2 * layout.num_kv_heads)
    return first[:, None, :] + np.arange(layout.num_kv_heads)[None, :, None]


def _rows_to_write(
    layout: KvLayout, spans: Sequence[Span], tables: Sequence[npt.NDArray[np.int64]]
) -> Tensor:
    """[num_kv_heads * num_tokens] rows of ``KvPool.vectors`` for the keys of layer 0."""
    positions = [np.arange(span.start, span.end) for span in spans]
    blocks = np.concatenate(
        [table[p // layout.block_size] for table, p in zip(tables, positions, strict=True)]
    )
    offsets = np.concatenate(positions) % layout.block_size
    heads = _head_rows(layout, blocks[None])[0]  # [num_kv_heads, num_tokens]
    return torch.from_numpy((heads * layout.block_size + offsets).reshape(-1))


def _attend_decodes(
    group: DecodeGroup, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """query: [num_heads, num_tokens, head_dim] of the whole batch; returns the group's rows,
    [n, num_heads, head_dim]."""
    n, num_kv_heads, _, head_dim = keys.shape
    queries = query[:, group.tokens].transpose(0, 1).reshape(n, num_kv_heads, -1, 1, head_dim)
    return attend(queries, keys, values, group.mask, scoring).reshape(n, -1, head_dim)


def _attend_chunk(
    chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, out: Tensor
) -> None:
    """query: [num_heads, count, head_dim]; out: [count, num_heads, head_dim]. Tile by tile, each
    over the keys that it can see, so that the upper triangle costs nothing."""
    num_heads, count, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.view(1, num_kv_heads, num_heads // num_kv_heads, count, head_dim)
    for first in range(0, count, _TILE):
        last = min(first + _TILE, count)
        begin, end = _visible_keys(chunk, first, last, scoring.window)
        mask = _tile_mask(chunk, first, last, begin, end, scoring.window)
        tile = attend(
            grouped[:, :, :, first:last],
            keys[:, :, begin:end],
            values[:, :, begin:end],
            mask,
            scoring,
        )
        out[first:last] = tile.reshape(num_heads, last - first, head_dim).transpose(0, 1)


def _visible_keys(chunk: Chunk, first: int, last: int, window: int | None) -> tuple[int, int]:
    """Which of the chunk's keys queries [first, last) see, counted from ``chunk.first_key``."""
    end = chunk.start + last - chunk.first_key
    if window is None:
        return 0, end
    return max(0, chunk.start + first + 1 - window - chunk.first_key), end


def _tile_mask(
    chunk: Chunk, first: int, last: int, begin: int, end: int, window: int | None
) -> Tensor:
    """[last - first, end - begin], 0 or -inf."""
    queries = np.arange(chunk.start + first, chunk.start + last)[:, None]
    keys = np.arange(chunk.first_key + begin, chunk.first_key + end)[None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return _additive(visible)


def _additive(visible: npt.NDArray[np.bool_]) -> Tensor:
    """0 where visible, -inf elsewhere, float32."""
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf)))


def _padded(blocks: npt.NDArray[np.int64], num_blocks: int) -> npt.NDArray[np.int64]:
    """``blocks`` filled up with its last one: a sequence never reads what is not its own."""
    return np.pad(blocks, (0, num_blocks - len(blocks)), mode="edge")
