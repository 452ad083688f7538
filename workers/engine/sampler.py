"""From logits to tokens, many rows at once, each as if it were alone.

Order: logit bias, penalties, masks (``min_tokens``, allowed ids) | temperature, top-k, top-p,
min-p, draw. Logprobs are those at the bar; what is masked is in no list of alternatives. Those of
a prompt's own tokens are of the logits as they come.

What is drawn depends on the row's logits and on (seed, choice, token number), on nothing else: the
random number is a hash of these three, so there is no generator whose state would have to move
with a request, and a row's sums never mix with other rows'.

Top-k, top-p and min-p each keep a prefix of the tokens in order (probability descending, id
ascending); the draw is an inverse CDF over that prefix. Sorting [32, 49152] takes 92 ms, twice a
decode step, so the prefix is looked for among the likeliest 256 tokens, for rows where it may
reach further among more, and only then among all. Only top-p without top-k needs to know what the
whole vocabulary weighs. A row without filters is drawn over all tokens in id order. What looks at
every token is in ``scan``.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from schemas.requests import SamplingParams
from workers.engine.api import Sampled, ScheduledSequence
from workers.engine.candidates import Candidates
from workers.engine.penalties import adjust_logits
from workers.engine.scan import RUN, TORCH_SCAN, Scan, weights

NUM_CANDIDATES = (256, 2048, 16384)
"""How many of the likeliest tokens are looked at, one after the other, before all are."""

_NOT_KNOWN = -1  # in place of a token id
_SLAB = 8  # rows whose logprobs are made at a time, so that they stay in the processor's cache
_Way = Callable[[Tensor, Sequence[ScheduledSequence], Scan], list[int]]
_GREEDY_BELOW = 1e-5  # a temperature that would overflow float32 where it changed anything


def sample_and_score(
    logits: Tensor,
    batch: Sequence[ScheduledSequence],
    eos_token_ids: frozenset[int],
    scan: Scan = TORCH_SCAN,
) -> list[Sampled]:
    """Choose a token for each sequence with ``sample`` set, and note the scores of prompts.

    Args:
        logits: [num_rows, vocab_size]: a row per sequence with ``sample`` set, then one per
            position that is ``scored``, both in batch order.

    Returns:
        One result per sequence with ``sample`` set, in batch order.
    """
    rows = [sequence for sequence in batch if sequence.sample]
    if len(logits) > len(rows):
        _score(logits[len(rows) :], [one for one in batch if one.scores is not None])
        logits = logits[: len(rows)]
    return sample(logits, rows, eos_token_ids, scan) if rows else []


@torch.inference_mode()
def sample(
    logits: Tensor,
    rows: Sequence[ScheduledSequence],
    eos_token_ids: frozenset[int],
    scan: Scan = TORCH_SCAN,
) -> list[Sampled]:
    """Choose one token per row.

    Args:
        logits: [num_rows, vocab_size], any float dtype; not changed.
        rows: what each row belongs to; its ``sampling.seed`` is set.
        scan: who looks at every token.

    Returns:
        One result per row, in order.
    """
    adjusted = adjust_logits(logits, rows, eos_token_ids)
    token_ids = draw(adjusted, rows, scan)
    return [
        Sampled(token_id=token_id)
        if row.sampling.logprobs is None
        else _with_logprobs(token_id, adjusted[number], row.sampling.logprobs)
        for number, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))
    ]


def uniform(seed: int, index: int, number: int) -> float:
    """The random number of one token: 53 bits in [0, 1), a hash of seed (modulo 2**64), choice
    and token number."""
    message = struct.pack("<QQQ", seed & 0xFFFF_FFFF_FFFF_FFFF, index, number)
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def draw(logits: Tensor, rows: Sequence[ScheduledSequence], scan: Scan = TORCH_SCAN) -> list[int]:
    """Token ids for adjusted logits, [num_rows, vocab_size] float32."""
    ways: dict[_Way, list[int]] = {}
    for number, row in enumerate(rows):
        ways.setdefault(_way(row.sampling), []).append(number)
    if len(ways) == 1:
        (choose,) = ways
        return choose(logits, rows, scan)
    chosen = [0] * len(rows)
    for choose, numbers in ways.items():
        share = choose(logits[numbers], [rows[number] for number in numbers], scan)
        for number, token_id in zip(numbers, share, strict=True):
            chosen[number] = token_id
    return chosen


def _way(sampling: SamplingParams) -> _Way:
    """How a token is chosen."""
    if sampling.temperature < _GREEDY_BELOW:
        return _draw_greedy
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        return _draw_filtered
    return _draw_unfiltered


def _draw_greedy(logits: Tensor, rows: Sequence[ScheduledSequence], scan: Scan) -> list[int]:
    return scan.largest(logits)


def _draw_unfiltered(logits: Tensor, rows: Sequence[ScheduledSequence], scan: Scan) -> list[int]:
    """Two levels, so that no sum over the vocabulary is written out: which run, which token."""
    temperatures, vocab_size = _temperatures(rows), logits.shape[1]
    all_weights = scan.weigh(logits, temperatures)
    up_to = all_weights.sums.cumsum(-1)
    target = _uniforms(rows) * up_to[:, -1]
    run = _first_above(up_to, target)[:, None]
    ids = run * RUN + torch.arange(RUN)
    logits_of_run = logits.gather(1, ids.clamp(max=vocab_size - 1))
    logits_of_run.masked_fill_(ids >= vocab_size, -torch.inf)
    before = F.pad(up_to, (1, 0)).gather(1, run)
    within = weights(logits_of_run, all_weights.largest, temperatures).double().cumsum(-1) + before
    chosen: list[int] = (run[:, 0] * RUN + _first_above(within, target)).tolist()
    return [min(token_id, vocab_size - 1) for token_id in chosen]  # a row of NaN


def _draw_filtered(logits: Tensor, rows: Sequence[ScheduledSequence], scan: Scan) -> list[int]:
    vocab_size = logits.shape[1]
    totals = _totals(logits, rows, scan)
    tokens = [0] * len(rows)
    left = list(range(len(rows)))
    for at_least in (*NUM_CANDIDATES, vocab_size):
        share = logits if len(left) == len(rows) else logits[left]
        candidates = scan.likeliest(share, at_least)
        drawn = _draw_prefix(candidates, totals[left], [rows[number] for number in left])
        for number, token_id in zip(left, drawn, strict=True):
            tokens[number] = token_id
        left = [number for number in left if tokens[number] == _NOT_KNOWN]
        if not left:
            break
    return tokens


def _draw_prefix(
    candidates: Candidates, totals: Tensor, rows: Sequence[ScheduledSequence]
) -> list[int]:
    """Draw from the filters' prefix where it lies within the candidates.

    Top-p counts the mass of what top-k leaves: of all tokens without it (``totals``, [num_rows]
    float64). What weighs nothing is never drawn, so every prefix ends before it.

    Returns:
        Token ids; ``_NOT_KNOWN`` where the prefix may reach further.
    """
    first = candidates.logits[:, :1]
    weight = weights(candidates.logits, first, _temperatures(rows)).double()
    cumulated = weight.cumsum(-1)
    counts, width = candidates.counts, weight.shape[1]
    top_k = _column(rows, lambda s: s.top_k if s.top_k > 0 else math.inf)
    top_p = _column(rows, lambda s: s.top_p if s.top_p < 1.0 else math.inf)
    min_p = _column(rows, lambda s: s.min_p)

    by_k = torch.minimum(top_k, (weight > 0).sum(-1)).long()
    mass = cumulated.gather(1, top_k.clamp(max=width).long()[:, None] - 1)[:, 0]
    mass = torch.where(top_k.isinf(), totals, mass)
    by_p = (cumulated - weight < (top_p * mass)[:, None]).sum(-1)
    by_min_p = (weight >= (min_p * weight[:, 0])[:, None]).sum(-1)
    size = torch.minimum(torch.minimum(by_k, by_p), by_min_p).clamp(min=1)

    is_mass_known = top_k.isinf() | (top_k <= counts) | top_p.isinf()
    ends_here = (size < counts) | (top_k <= counts) | (cumulated[:, -1] >= top_p * mass)
    is_known = candidates.is_all | (is_mass_known & ends_here & (counts > 0))
    last = cumulated.gather(1, size[:, None] - 1)
    place = _first_above(cumulated.minimum(last), _uniforms(rows) * last[:, 0])
    chosen: list[int] = (
        candidates.ids.gather(1, place[:, None])[:, 0].masked_fill(~is_known, _NOT_KNOWN).tolist()
    )
    return chosen


def _totals(logits: Tensor, rows: Sequence[ScheduledSequence], scan: Scan) -> Tensor:
    """[num_rows] float64: what all tokens of a row weigh together, where top-p asks for that;
    elsewhere 1."""
    totals = torch.ones(len(rows), dtype=torch.float64)
    asking = [n for n, row in enumerate(rows) if row.sampling.top_p < 1 and row.sampling.top_k <= 0]
    if asking:
        share = logits if len(asking) == len(rows) else logits[asking]
        sums = scan.weigh(share, _temperatures([rows[number] for number in asking])).sums
        totals[asking] = sums.cumsum(-1)[:, -1]
    return totals


def _temperatures(rows: Sequence[ScheduledSequence]) -> Tensor:
    return _column(rows, lambda s: s.temperature).float()[:, None]


def _first_above(cumulated: Tensor, target: Tensor) -> Tensor:
    """The first place whose cumulated weight exceeds the target, per row: [num_rows] int64. A
    target that rounding has put at the last sum or beyond it is taken to be just below."""
    last = cumulated[:, -1:]
    below = torch.nextafter(last, torch.zeros_like(last))
    places = torch.searchsorted(cumulated, torch.minimum(target[:, None], below), right=True)[:, 0]
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


def _with_logprobs(token_id: int, logits: Tensor, num_top: int) -> Sampled:
    (found,) = _logprobs(logits[None], [token_id], num_top)
    return found


@torch.inference_mode()
def _score(logits: Tensor, sequences: Sequence[ScheduledSequence]) -> None:
    """logits: [num_rows, vocab_size], a row per position that is ``scored``, in order."""
    first = 0
    for sequence in sequences:
        assert sequence.scores is not None, "only sequences with scores are asked"
        num_top, positions = sequence.sampling.prompt_logprobs or 0, sequence.scored
        for start in range(0, len(positions), _SLAB):
            slab = positions[start : start + _SLAB]
            ids = sequence.token_ids[slab.start + 1 : slab.stop + 1]
            rows = logits[first : first + len(slab)].float()
            for position, found in zip(slab, _logprobs(rows, ids, num_top), strict=True):
                sequence.scores.put(position + 1, found)
            first += len(slab)


def _logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> Iterator[Sampled]:
    """How likely one token per row is, and which are most likely there.

    Args:
        logits: [num_rows, vocab_size] float32.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_top, logprobs.shape[1]))
    tables = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    for token_id, logprob, (ids, values) in zip(token_ids, own, tables, strict=True):
        pairs = (pair for pair in zip(ids, values, strict=True) if pair[1] > -math.inf)
        ranked = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        yield Sampled(token_id=token_id, logprob=logprob, top=ranked)
