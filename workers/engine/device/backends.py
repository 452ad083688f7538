"""Attention over the paged pool, four ways behind one signature.

Keys and values of the step are in the pool already. See ``choice`` for when each is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.attention import Scoring, attend
from workers.engine.device.batch import PagedBatch, Share
from workers.engine.kv_pool import KvPool

Attention = Callable[[KvPool, Tensor, int, PagedBatch, Scoring], Tensor]
"""(pool, query [num_rows, num_heads, head_dim], layer, batch, scoring) -> like query."""

_TILE = 128  # queries of a chunk that are attended at once: bounds the scores' memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One way to compute attention.

    Attributes:
        decodes_only: one query per sequence; other steps need another way.
        is_recordable: launches depend on the step's shape alone, so a CUDA graph can hold them.
        reads_table: reads a table to its width, not to a sequence's end.
    """

    name: str
    attend: Attention
    decodes_only: bool = False
    is_recordable: bool = True
    reads_table: bool = False


def make_backend(name: str) -> Backend:
    """The way of that name, ready for use.

    Raises:
        Exception: of any kind, when what it needs can't be imported.
    """
    match name:
        case "fa3":
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl("FA3")
            return Backend(name=name, attend=fa3_attention)
        case "triton":
            from workers.engine.device.triton_decode import paged_decode

            return Backend(name=name, attend=paged_decode, decodes_only=True)
        case "varlen":
            return Backend(name=name, attend=varlen_attention, is_recordable=False)
        case "gather":
            return Backend(name=name, attend=gather_attention, reads_table=True)
    raise ValueError(f"no attention is called {name!r}")


def gather_attention(
    pool: KvPool, query: Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> Tensor:
    """Plain torch, with everything a model may ask for."""
    layout = pool.layout
    out = torch.empty_like(query)
    heads = torch.arange(layout.num_kv_heads, device=query.device)
    for share in batch.shares:
        table = batch.block_table[share.first : share.last, : share.num_blocks].long()
        first = table * (layout.num_layers * 2 * layout.num_kv_heads)
        keys, values = pool.gather(first[:, None, :] + heads[:, None], layer)
        ends = batch.seqused_k[share.first : share.last].long()
        num, count = share.last - share.first, share.num_queries
        rows = slice(share.first_row, share.first_row + num * count)
        grouped = query[rows].view(num, count, layout.num_kv_heads, -1, query.shape[-1])
        grouped = grouped.permute(0, 2, 3, 1, 4)
        for begin in range(0, count, _TILE):
            end = min(begin + _TILE, count)
            mask = _mask(share, ends, (begin, end), keys.shape[2], scoring.window)
            tile = attend(grouped[:, :, :, begin:end], keys, values, mask, scoring)
            target = out[rows].view(num, count, -1, query.shape[-1])[:, begin:end]
            target.copy_(tile.permute(0, 3, 1, 2, 4).reshape(target.shape))
    return out


def _mask(
    share: Share, ends: Tensor, queries: tuple[int, int], num_keys: int, window: int | None
) -> Tensor:
    """[n, 1, 1, num_queries, num_keys] float32, 0 or -inf."""
    places = torch.arange(*queries, device=ends.device) - share.num_queries
    positions = (ends[:, None] + places)[:, :, None]
    keys = torch.arange(num_keys, device=ends.device)
    visible = keys <= positions
    if window is not None:
        visible &= keys > positions - window
    mask = torch.zeros(visible.shape, device=ends.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None, None]


def varlen_attention(
    pool: KvPool, query: Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> Tensor:
    """torch's own FlashAttention 2 over gathered keys and values; no soft cap, no sinks."""
    from torch.nn.attention.varlen import varlen_attn

    layout = pool.layout
    rows, cu_k = batch.packed_rows(pool)
    rows = rows + layer * 2 * layout.num_kv_heads * layout.block_size
    keys = pool.vectors[rows]
    values = pool.vectors[rows + layout.num_kv_heads * layout.block_size]
    out = varlen_attn(
        query.contiguous(),
        keys,
        values,
        batch.cu_q,
        cu_k,
        batch.max_q,
        batch.max_k,
        scale=scoring.scale,
        window_size=_flash_window(scoring.window),
        enable_gqa=True,
    )
    assert isinstance(out, Tensor), "nothing but the output was asked for"
    return out


def fa3_attention(
    pool: KvPool, query: Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> Tensor:
    """FlashAttention 3 over the pool itself; no soft cap, no sinks."""
    from torch.nn.attention.varlen import varlen_attn

    keys, values = pages(pool, layer)
    out = varlen_attn(
        query.contiguous(),
        keys,
        values,
        batch.cu_q,
        None,
        batch.max_q,
        batch.max_k,
        scale=scoring.scale,
        window_size=_flash_window(scoring.window),
        enable_gqa=True,
        seqused_k=batch.seqused_k,
        block_table=batch.block_table,
    )
    assert isinstance(out, Tensor), "nothing but the output was asked for"
    return out


def pages(pool: KvPool, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]: views,
    contiguous in the last dimension alone."""
    layout = pool.layout
    shape = (-1, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    blocks = pool.heads.view(shape)[:, layer].transpose(2, 3)
    return blocks[:, 0], blocks[:, 1]


def _flash_window(window: int | None) -> tuple[int, int]:
    """Keys before and behind a query, itself not counted; -1: all."""
    return (-1 if window is None else window - 1, 0)
