"""From logits to tokens, many rows at once, each as if it were alone.

Order: logit bias, penalties, masks (``min_tokens``, allowed ids) | temperature, top-k, top-p,
min-p, draw. Logprobs are those at the bar; what is masked is in no list of alternatives.

What is drawn depends on the row's logits and on (seed, choice, token number), on nothing else: the
random number is a hash of these three, so there is no generator whose state would have to move
with a request, and a row's sums never mix with other rows'.

Top-k, top-p and min-p each keep a prefix of the tokens in order (probability descending, id
ascending); the draw is an inverse CDF over that prefix. Sorting [32, 49152] takes 92 ms, twice a
decode step, so the prefix is looked for among the 256 likeliest tokens (4 ms); a row whose prefix
may reach further is sorted whole. A row without filters is drawn over all tokens in id order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from schemas.requests import SamplingParams
from workers.engine.api import Sampled, ScheduledSequence
from workers.engine.penalties import adjust_logits

NUM_CANDIDATES = 256
_GREEDY_BELOW = 1e-5  # a temperature that would overflow float32 where it changed anything


@torch.inference_mode()
def sample(
    logits: Tensor, rows: Sequence[ScheduledSequence], eos_token_ids: frozenset[int]
) -> list[Sampled]:
    """Choose one token per row.

    Args:
        logits: [num_rows, vocab_size], any float dtype; not changed.
        rows: what each row belongs to; its ``sampling.seed`` is set.

    Returns:
        One result per row, in order.
    """
    adjusted = adjust_logits(logits, rows, eos_token_ids)
    token_ids = draw(adjusted, rows)
    return [
        _with_logprobs(token_id, adjusted[number], row.sampling.logprobs)
        for number, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))
    ]


def uniform(seed: int, index: int, number: int) -> float:
    """The random number of one token: 53 bits in [0, 1), a hash of seed (modulo 2**64), choice
    and token number."""
    message = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, number)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def draw(logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[int]:
    """Token ids for adjusted logits, [num_rows, vocab_size] float32."""
    chosen = [0] * len(rows)
    for is_of_kind, choose in (
        (_is_greedy, _draw_greedy),
        (_is_unfiltered, _draw_unfiltered),
        (_is_filtered, _draw_filtered),
    ):
        numbers = [number for number, row in enumerate(rows) if is_of_kind(row.sampling)]
        if numbers:
            share = logits if len(numbers) == len(rows) else logits[numbers]
            for number, token_id in zip(
                numbers, choose(share, [rows[number] for number in numbers]), strict=True
            ):
                chosen[number] = token_id
    return chosen


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < _GREEDY_BELOW


def _is_unfiltered(sampling: SamplingParams) -> bool:
    has_filter = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return not _is_greedy(sampling) and not has_filter


def _is_filtered(sampling: SamplingParams) -> bool:
    return not _is_greedy(sampling) and not _is_unfiltered(sampling)


def _draw_greedy(logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[int]:
    chosen: list[int] = logits.argmax(-1).tolist()  # the first of equals
    return chosen


def _draw_unfiltered(logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[int]:
    cumulated = _weights(logits, rows).cumsum(-1, dtype=torch.float64)
    chosen: list[int] = _invert(cumulated, _uniforms(rows), cumulated[:, -1:]).tolist()
    return chosen


def _draw_filtered(logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[int]:
    weights = _weights(logits, rows)
    totals = weights.cumsum(-1, dtype=torch.float64)[:, -1]
    candidates = logits.topk(min(NUM_CANDIDATES, logits.shape[-1]), -1).indices
    candidates = candidates.sort(-1).values  # so that a stable sort puts equals in id order
    tokens, is_exact = _draw_prefix(logits, weights, totals, candidates, rows)
    if not all(is_exact):
        left = [number for number, exact in enumerate(is_exact) if not exact]
        everything = torch.arange(logits.shape[-1]).expand(len(left), -1)
        redrawn, _ = _draw_prefix(
            logits[left], weights[left], totals[left], everything, [rows[n] for n in left]
        )
        for number, token_id in zip(left, redrawn, strict=True):
            tokens[number] = token_id
    return tokens


def _draw_prefix(
    logits: Tensor,
    weights: Tensor,
    totals: Tensor,
    candidates: Tensor,
    rows: Sequence[ScheduledSequence],
) -> tuple[list[int], list[bool]]:
    """Draw from the filters' prefix as far as it lies within the candidates.

    Args:
        candidates: [num_rows, num_candidates] ids in ascending order; the likeliest tokens, or
            all.

    Returns:
        Token ids, and for each row whether the prefix is known to end within the candidates: its
        last token is likelier than the least likely candidate, so nothing outside belongs to it
        or is equal to what does.
    """
    num_candidates, vocab_size = candidates.shape[1], logits.shape[1]
    order = logits.gather(1, candidates).sort(stable=True, dim=-1, descending=True)
    ids = candidates.gather(1, order.indices)
    sorted_weights = weights.gather(1, ids).double()
    cumulated = sorted_weights.cumsum(-1)
    top_k = _column(rows, lambda s: s.top_k if s.top_k > 0 else vocab_size).long()
    top_k = top_k.clamp(max=vocab_size)
    mass = _mass(cumulated, totals, top_k, vocab_size)
    last = _prefix_sizes(sorted_weights, cumulated, mass, top_k, rows)[:, None] - 1
    ends_within = order.values.gather(1, last)[:, 0] > order.values[:, -1]
    is_exact = (ends_within & ~mass.isnan()) | (num_candidates == vocab_size)
    places = _invert(cumulated, _uniforms(rows), cumulated.gather(1, last))
    return ids.gather(1, places[:, None])[:, 0].tolist(), is_exact.tolist()


def _mass(cumulated: Tensor, totals: Tensor, top_k: Tensor, vocab_size: int) -> Tensor:
    """[num_rows]: what the likeliest ``top_k`` tokens weigh together; NaN where the sorted
    candidates do not reach so far."""
    num_candidates = cumulated.shape[1]
    within = cumulated.gather(1, top_k.clamp(max=num_candidates)[:, None] - 1)[:, 0]
    within = within.masked_fill(top_k > num_candidates, torch.nan)
    return torch.where(top_k == vocab_size, totals, within)


def _prefix_sizes(
    weights: Tensor,
    cumulated: Tensor,
    mass: Tensor,
    top_k: Tensor,
    rows: Sequence[ScheduledSequence],
) -> Tensor:
    """How many of the sorted candidates each row keeps, at least one: [num_rows] int64. Top-p
    counts the mass of what top-k leaves. What weighs nothing is never drawn, so the prefix ends
    before it: a row with few allowed tokens is not looked for among all."""
    by_k = torch.minimum(top_k, (weights > 0).sum(-1))
    top_p = _column(rows, lambda s: s.top_p if s.top_p < 1.0 else 2.0)
    before = cumulated - weights
    by_p = (before < (top_p * mass)[:, None]).sum(-1)
    min_p = _column(rows, lambda s: s.min_p)
    by_min_p = (weights >= (min_p * weights[:, 0])[:, None]).sum(-1)
    return torch.minimum(torch.minimum(by_k, by_p), by_min_p).clamp(min=1)


def _weights(logits: Tensor, rows: Sequence[ScheduledSequence]) -> Tensor:
    """exp((logit - largest) / temperature): probabilities up to a factor per row, float32."""
    temperature = _column(rows, lambda s: s.temperature).float()
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None]).exp_()


def _invert(cumulated: Tensor, uniforms: Tensor, totals: Tensor) -> Tensor:
    """The first place whose cumulated weight exceeds uniform * total, per row: [num_rows].

    ``totals`` [num_rows, 1] are among ``cumulated``, so the place is never past the total's."""
    below = torch.nextafter(totals, torch.zeros_like(totals))
    target = torch.minimum(uniforms[:, None] * totals, below)
    places = torch.searchsorted(cumulated, target, right=True)[:, 0]
    return places.clamp(max=cumulated.shape[1] - 1)  # a row of NaN has no such place


def _uniforms(rows: Sequence[ScheduledSequence]) -> Tensor:
    numbers = []
    for row in rows:
        seed = row.sampling.seed
        assert seed is not None, "admission sets a seed"
        numbers.append(uniform(seed, row.index, row.token_number))
    return torch.tensor(numbers, dtype=torch.float64)


def _column(rows: Sequence[ScheduledSequence], value: Callable[[SamplingParams], float]) -> Tensor:
    return torch.tensor([value(row.sampling) for row in rows], dtype=torch.float64)


def _with_logprobs(token_id: int, logits: Tensor, num_top: int | None) -> Sampled:
    if num_top is None:
        return Sampled(token_id=token_id)
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(min(num_top, len(logprobs)))
    pairs = (
        pair
        for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        if pair[1] > -math.inf
    )
    return Sampled(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        top=tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))),
    )
