"""A Triton kernel for steps of decodes: one query per sequence, keys read where they lie.

A program takes one sequence's queries of one KV head, and a share of its keys; a second, small
step in torch joins the shares. Launches depend on the step's shape alone, lengths are read on the
device, so a recorded step can be replayed for other sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.engine.attention import Scoring
from workers.engine.device.batch import PagedBatch
from workers.engine.kv_pool import KvPool

_KEYS = 64  # at a time
_MIN_ROWS = 16  # the least that a tensor core multiplies
_PROGRAMS = 512  # about four for each multiprocessor of a large device
_MIN_KEYS_PER_SHARE = 256


def paged_decode(
    pool: KvPool, query: Tensor, layer: int, batch: PagedBatch, scoring: Scoring
) -> Tensor:
    """As :data:`workers.engine.device.backends.Attention`; ``batch.max_q`` is 1."""
    assert batch.max_q == 1, "one query per sequence"
    layout = pool.layout
    num, num_heads, head_dim = query.shape
    group = num_heads // layout.num_kv_heads
    shares = num_shares(num * layout.num_kv_heads, batch.max_k)
    parts = query.new_empty((shares, num, num_heads, head_dim), dtype=torch.float32)
    sums = query.new_empty((shares, num, num_heads), dtype=torch.float32)
    kernel: Any = _attend_share
    kernel[(num, layout.num_kv_heads, shares)](
        query,
        pool.vectors,
        batch.block_table,
        batch.seqused_k,
        parts,
        sums,
        scoring.scale,
        scoring.softcap or 1.0,
        batch.block_table.shape[1],
        layer * 2 * layout.num_kv_heads,
        layout.num_layers * 2 * layout.num_kv_heads,
        HAS_SOFTCAP=scoring.softcap is not None,
        WINDOW=scoring.window or 0,
        GROUP=group,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        COLUMNS=max(_MIN_ROWS, triton.next_power_of_2(head_dim)),
        NUM_KV_HEADS=layout.num_kv_heads,
        BLOCK_SIZE=layout.block_size,
        KEYS=_KEYS,
    )
    return _join(parts, sums, scoring.sinks).to(query.dtype)


def num_shares(num_pairs: int, max_k: int) -> int:
    """Into how many shares a sequence's keys are cut: enough programs for the device, and no
    share of a few keys."""
    most = -(-max_k // _MIN_KEYS_PER_SHARE)
    return max(1, min(most, _PROGRAMS // max(num_pairs, 1)))


def _join(parts: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor:
    """parts: [shares, n, num_heads, head_dim], each share's own average of values; sums:
    [shares, n, num_heads], the logarithm of what its keys weigh."""
    if sinks is not None:
        total = torch.cat([sums, sinks.float().expand(1, *sums.shape[1:])]).logsumexp(0)
    else:
        total = sums.logsumexp(0)
    return (parts * (sums - total).exp()[..., None]).sum(0)


@triton.jit
def _capped(scores, softcap):
    """softcap * tanh(scores / softcap), by way of what never overflows."""
    small = tl.exp(-2.0 * tl.abs(scores) / softcap)
    return tl.where(scores < 0, -softcap, softcap) * (1.0 - small) / (1.0 + small)


@triton.jit
def _attend_share(
    query,
    vectors,
    table,
    lengths,
    parts,
    sums,
    scale,
    softcap,
    width,
    first_head,
    heads_per_block,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    sequence, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    per_share = tl.cdiv(length - begin, tl.num_programs(2))
    begin += share * per_share
    end = tl.minimum(begin + per_share, length)

    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    heads = (sequence * NUM_KV_HEADS + head) * GROUP + rows
    is_query = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    q = tl.load(query + heads[:, None] * HEAD_DIM + columns[None, :], mask=is_query, other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    average = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(begin, end, KEYS):
        positions = first + tl.arange(0, KEYS)
        is_key = positions < end
        blocks = tl.load(table + sequence * width + positions // BLOCK_SIZE, mask=is_key, other=0)
        at = blocks.to(tl.int64) * heads_per_block + first_head + head
        at = (at * BLOCK_SIZE + positions % BLOCK_SIZE) * HEAD_DIM
        is_there = is_key[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(vectors + at[:, None] + columns[None, :], mask=is_there, other=0.0)
        at += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        v = tl.load(vectors + at[:, None] + columns[None, :], mask=is_there, other=0.0)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        kept = tl.exp(largest - new_largest)
        weight = weight * kept + tl.sum(weights, 1)
        average = average * kept[:, None]
        average += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest

    # A share without keys weighs nothing: log(0) is -inf, and its average is 0.
    place = share * tl.num_programs(0) * NUM_KV_HEADS * GROUP + heads
    divisor = tl.where(weight > 0, weight, 1.0)
    found = average / divisor[:, None]
    tl.store(parts + place[:, None] * HEAD_DIM + columns[None, :], found, mask=is_query)
    tl.store(
        sums + place,
        tl.where(weight > 0, largest + tl.log(divisor), float("-inf")),
        mask=rows < GROUP,
    )
