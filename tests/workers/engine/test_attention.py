"""Paged attention against attention written down plainly, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from schemas.errors import ModelUnsupported
from workers.engine.attention import Scoring, attending, paged_attention
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool
from workers.engine.paged_step import PagedStep, Span

HEAD_DIM = 8
NUM_KV_HEADS = 2
BLOCK_SIZE = 4
LAYOUT = KvLayout(
    revision="r",
    dtype="float32",
    num_layers=2,
    num_kv_heads=NUM_KV_HEADS,
    head_dim=HEAD_DIM,
    block_size=BLOCK_SIZE,
)
STALE = 1e4  # what an earlier owner left in a block


@dataclass
class History:
    """All keys and values of a sequence, [num_kv_heads, num_tokens, head_dim], and its queries."""

    query: Tensor
    keys: Tensor
    values: Tensor


def plain_attention(history: History, position: int, scoring: Scoring) -> Tensor:
    """[num_heads, head_dim] of one query, in float64."""
    first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
    query = history.query[:, position].double()
    group = query.shape[0] // NUM_KV_HEADS
    keys = history.keys[:, first : position + 1].double().repeat_interleave(group, 0)
    values = history.values[:, first : position + 1].double().repeat_interleave(group, 0)
    scores = (keys @ query[:, :, None])[..., 0] * scoring.scale
    if scoring.softcap is not None:
        scores = (scores / scoring.softcap).tanh() * scoring.softcap
    weights = scores.exp()
    total = weights.sum(-1)
    if scoring.sinks is not None:
        total = total + scoring.sinks.double().exp()
    return (weights[..., None] * values).sum(1) / total[:, None]


def packed(histories: list[History], spans: list[Span], name: str) -> Tensor:
    parts = [
        getattr(history, name)[:, span.start : span.end]
        for history, span in zip(histories, spans, strict=True)
    ]
    return torch.cat(parts, 1)[None]


def fresh_pool(num_blocks: int, value: float = torch.nan) -> KvPool:
    pool = KvPool(torch.zeros(num_blocks, LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT)
    pool.vectors.fill_(value)
    return pool


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Scoring, int, int]:
    """Spans as (start, count), how to score, heads per KV head, a seed."""
    shares = draw(
        st.lists(
            st.tuples(
                st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 9), st.integers(120, 140))
            ),
            min_size=1,
            max_size=5,
        )
    )
    group = draw(st.sampled_from([1, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    scoring = Scoring(
        draw(st.sampled_from([0.35, 1.0])),
        draw(st.sampled_from([None, 1, 5, 16, 200])),
        draw(st.sampled_from([None, 2.0])),
        draw(st.sampled_from([None, torch.randn(NUM_KV_HEADS * group, generator=generator)])),
    )
    ordered = sorted(shares, key=lambda share: (share[1] != 1, -share[0]))
    return ordered, scoring, group, draw(st.integers(0, 2**31))


@given(batches())
@settings(max_examples=80, deadline=None)
def test_each_query_sees_what_it_should(
    case: tuple[list[tuple[int, int]], Scoring, int, int],
) -> None:
    """Ragged batches of decodes and chunks, blocks in any order, windows, soft cap, sinks, grouped
    heads: every row is the plain result over the sequence's own tokens. Blocks of nobody hold NaN,
    so whoever read one would show it; own blocks hold stale numbers behind the last token."""
    shares, scoring, group, seed = case
    torch.manual_seed(seed)
    num_blocks = [-(-(start + count) // BLOCK_SIZE) for start, count in shares]
    order = iter((torch.randperm(2 * sum(num_blocks)) + 1).tolist())
    spans = [
        Span([next(order) for _ in range(blocks)], start, count)
        for (start, count), blocks in zip(shares, num_blocks, strict=True)
    ]
    pool = fresh_pool(2 * sum(num_blocks) + 1)
    histories = [
        History(
            torch.randn(NUM_KV_HEADS * group, span.end, HEAD_DIM),
            torch.randn(NUM_KV_HEADS, span.end, HEAD_DIM),
            torch.randn(NUM_KV_HEADS, span.end, HEAD_DIM),
        )
        for span in spans
    ]
    blocks_view = pool.vectors.view(-1, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    for history, span in zip(histories, spans, strict=True):
        blocks_view[list(span.block_table)] = STALE
        for position in range(span.start):
            block, offset = span.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            blocks_view[block, 1, 0, :, offset] = history.keys[:, position]
            blocks_view[block, 1, 1, :, offset] = history.values[:, position]
    step = PagedStep(pool, spans)
    keys, values = packed(histories, spans, "keys"), packed(histories, spans, "values")
    step.update(keys, values, 1)
    got = step.attend(packed(histories, spans, "query"), keys, values, scoring)
    expected = torch.stack(
        [
            plain_attention(history, position, scoring)
            for history, span in zip(histories, spans, strict=True)
            for position in range(span.start, span.end)
        ]
    )
    torch.testing.assert_close(got[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_keys_and_values_lie_as_the_layout_says() -> None:
    """[layer][keys | values][kv_head][offset][head_dim] inside a block, and nothing else of the
    pool is touched: readers in other processes count on it."""
    pool = fresh_pool(4, value=0.0)
    step = PagedStep(pool, [Span([3, 1], 3, 2)])
    keys = torch.arange(1.0, 1 + NUM_KV_HEADS * 2 * HEAD_DIM).view(1, NUM_KV_HEADS, 2, HEAD_DIM)
    step.update(keys, -keys, 1)
    blocks = pool.vectors.view(4, 2, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    for block, offset, token in ((3, 3, 0), (1, 0, 1)):
        assert torch.equal(blocks[block, 1, 0, :, offset], keys[0, :, token])
        assert torch.equal(blocks[block, 1, 1, :, offset], -keys[0, :, token])
    assert int(blocks.count_nonzero()) == 2 * keys.numel()


def test_a_long_sequence_does_not_make_short_ones_long() -> None:
    """Decodes are attended in groups of similar length, so that padding at most doubles a
    sequence's cost, and with a window only the window's blocks are gathered."""
    ends = [1000, 600, 30, 20, 16, 3]
    spans = [Span(range(-(-end // BLOCK_SIZE)), end - 1, 1) for end in ends]
    step = PagedStep(fresh_pool(260), spans)
    groups = step.decode_groups(None)
    assert [(group.tokens.start, group.tokens.stop) for group in groups] == [(0, 2), (2, 5), (5, 6)]
    assert [group.rows.shape[-1] for group in groups] == [250, 8, 1]
    assert [group.rows.shape[-1] for group in step.decode_groups(10)] == [3, 3, 1]


def test_metadata_is_made_once_per_step() -> None:
    """Layers with the same window share what depends on the step alone."""
    step = PagedStep(fresh_pool(20), [Span(range(9), 30, 1), Span(range(9, 18), 8, 20)])
    assert step.decode_groups(8) is step.decode_groups(8)
    assert step.chunks(None) is step.chunks(None)
    assert step.chunks(8) is not step.chunks(None)


@pytest.mark.parametrize(
    ("is_causal", "mask", "kwargs", "reason"),
    [
        (False, None, {}, "later tokens"),
        (True, torch.zeros(1), {}, "own attention mask"),
        (True, None, {"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_attention_of_other_kinds_is_refused_by_name(
    is_causal: bool, mask: Tensor | None, kwargs: dict[str, Tensor], reason: str
) -> None:
    """What would be silently wrong is an error that says what the model wants."""
    module = nn.Module()
    module.is_causal = is_causal  # type: ignore[assignment]
    pool = fresh_pool(2, value=0.0)
    step = PagedStep(pool, [Span([0], 0, 2)])
    vectors = torch.zeros(1, NUM_KV_HEADS, 2, HEAD_DIM)
    step.update(vectors, vectors, 0)
    with attending(step), pytest.raises(ModelUnsupported, match=reason):
        paged_attention(module, vectors, vectors, vectors, mask, **kwargs)  # type: ignore[arg-type]


def test_a_layer_that_wrote_nothing_is_refused() -> None:
    """Layers that reuse another layer's keys and values would read the wrong ones here."""
    step = PagedStep(fresh_pool(1), [Span([0], 0, 1)])
    vectors = torch.zeros(1, NUM_KV_HEADS, 1, HEAD_DIM)
    with pytest.raises(ModelUnsupported, match="shares"):
        step.attend(vectors, vectors, vectors, Scoring(1.0))
