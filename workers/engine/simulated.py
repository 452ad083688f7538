"""A runner without a model: tokens from a hash of what came before, times from a cost model.

Its KV is real in the way that matters. The KV of a token is 8 bytes, the chained hash of all
tokens up to it, and it is read back from the pool to go on::

    pool[slot(i)] = (pool[slot(i - 1)] * RATIO + token_ids[i]) mod 2**64    START before the first
    next token    = function of pool[slot(last)], and with a temperature of seed, choice, number

So a wrong block table, a lost or half-written block or a handover gone wrong changes the tokens
that follow, as with a model, and the right tokens can be told without one. Logprobs are made up, in
the same way each time; in a prompt, the likeliest token is the one a greedy answer would have.
Penalties, logit bias, top-k, top-p and min-p have no effect. Where only some ids are allowed, it is
an end or one of the first of them, so that made-up JSON ends soon.

Every figure measured with it is a figure of the cost model.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from infra.transport.shm import SharedPool
from pipeline.cost_model import decode_step_ms, prefill_step_ms
from pipeline.prefix_hash import salt_of
from schemas.codec import pack_ids
from schemas.errors import ModelUnsupported
from schemas.profiles import StepCosts
from workers.engine.api import EngineInfo, InSharedPool, Sampled, ScheduledSequence
from workers.engine.engine import Engine
from workers.engine.output import REPLACEMENT, Vocabulary
from workers.engine.prompt_scores import PromptScores
from workers.engine.scheduler import EngineConfig
from workers.step_meter import StepMeter, step_shape

ENTRY_BYTES = 8  # the KV of one token
START = 0x9E3779B97F4A7C15  # stands before the first token: 2**64 divided by the golden ratio

_MASK = (1 << 64) - 1
_SPREAD = 0xBF58476D1CE4E5B9  # SplitMix64's
_SHIFT = 34  # leaves the upper 30 bits: one digit of Python's, and all that is below is in them
_ONE_IN = 200  # an answer ends by itself after about so many tokens, if there are as many to choose
_NUM_RANKED = 32  # tokens that a made-up distribution tells apart; a prompt's others are unlikely
_UNLIKELY = -12.0
_SLACK_S = 50e-6  # by which Linux lets timers be late; what is more, a busy machine took

_Words = npt.NDArray[np.uint64]

RATIO = 0x5851F42D4C957F2D  # Knuth's, of MMIX
_PIECE = 1024  # positions that are computed at once
_RATIO_UP: _Words = np.full(_PIECE, RATIO, np.uint64).cumprod()  # RATIO**1, RATIO**2, ...
_RATIO_DOWN: _Words = np.full(_PIECE, pow(RATIO, -1, 1 << 64), np.uint64).cumprod()


# Chosen, not measured here: the fit that DistServe published for OPT-13B on one A100
# (github.com/LLMServe/DistServe, simdistserve/estimators). ``mesh profile`` gives others.
DEFAULT_COSTS: Final = StepCosts(
    prefill_base_ms=18.10,
    prefill_token_ms=0.1019,
    prefill_square_ms=7.12e-6,
    decode_base_ms=19.93,
    decode_context_ms=6.27e-4,
    decode_sequence_ms=0.0385,
)


def batch_ms(costs: StepCosts, batch: Seq[ScheduledSequence]) -> float:
    """Milliseconds of one step over ``batch``; one that prefills and decodes takes both times."""
    num_tokens, num_squares, context_tokens, num_decoding = step_shape(batch)
    decode_ms = decode_step_ms(costs, num_decoding, context_tokens)
    if not num_tokens:
        return decode_ms
    return decode_ms + prefill_step_ms(costs, num_tokens, num_squares)


def mix(state: int, value: int) -> int:
    """64 bits, of which the lower half depends on all bits of both."""
    x = ((state ^ value) * _SPREAD + START) & _MASK
    return x ^ (x >> 32)


def _draw(scheduled: ScheduledSequence) -> int:
    """What a draw depends on, beside the tokens before it: seed, choice and number in one."""
    seed = scheduled.sampling.seed or 0
    return ((seed * RATIO + scheduled.index) * RATIO + scheduled.token_number) & _MASK


class StepClock:
    """When a step begins, and the waiting for its end: in real time.

    The system wakes who sleeps a little late, by more than a short step takes: that is taken off
    the waits that follow, so that many steps together take what they should.
    """

    def __init__(self) -> None:
        self._late_s = 0.0  # and not made up for

    def begin(self) -> float:
        """When the step that is computed now began, on the monotonic clock."""
        return time.monotonic()

    def end(self, end_s: float) -> None:
        """The step is over at ``end_s``, or now where computing took longer; returns about then."""
        left_s = end_s - time.monotonic()
        if left_s > self._late_s:
            wake_s = end_s - self._late_s
            time.sleep(left_s - self._late_s)
            self._late_s = min(max(0.0, time.monotonic() - wake_s), _SLACK_S)
        elif left_s > 0:
            self._late_s -= left_s


class SimulatedRunner(InSharedPool):
    """Implements :class:`workers.engine.api.Runner` over a pool of 8-byte entries.

    Args:
        pool: its block_bytes are ``info.block_size * ENTRY_BYTES``; of its slots it uses the first
            ``info.num_blocks``.
        token_ids: what answers are made of, apart from the end.
        costs: how long its steps take.
        clock: what they take it on; None: one of its own.
    """

    def __init__(
        self,
        pool: SharedPool,
        info: EngineInfo,
        token_ids: Seq[int],
        costs: StepCosts,
        clock: StepClock | None = None,
    ) -> None:
        self.info = info
        self._pool = pool
        self._answers = _answers(token_ids, info.eos_token_ids)
        self._costs = costs
        self._clock = clock or StepClock()
        self._block_size = info.block_size
        self._slots = pool.slots[: info.num_blocks]
        self._entries = self._slots.reshape(-1).data.cast("Q")
        self._entry_array = self._slots.reshape(-1).view(np.uint64)

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """Compute the batch; one result per sequence that samples, in batch order."""
        end_s = self._clock.begin() + batch_ms(self._costs, batch) / 1e3
        entries, size = self._entries, self._block_size
        answers, num_answers = self._answers, len(self._answers)
        sampled: list[Sampled] = []
        for one in batch:
            start, table = one.start, one.block_table
            if one.count == 1 and start:  # nearly all: written out, for a call costs as much
                offset = start % size
                here = table[start // size] * size + offset
                before = here - 1 if offset else (table[start // size - 1] + 1) * size - 1
                state = (entries[before] * RATIO + one.token_ids[start]) & _MASK
                entries[here] = state
            else:
                state = self._write_chunk(one)
            if one.is_greedy:
                if one.sample:  # what _likeliest() says
                    sampled.append(answers[((state * _SPREAD & _MASK) >> _SHIFT) % num_answers])
                continue
            if one.scores is not None:
                self._score(one.scores, one)
            if one.sample:
                sampled.append(self._sample(one, state))
        self._clock.end(end_s)
        return sampled

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another."""
        self._pool.copy_block(source, target)

    def _write_chunk(self, scheduled: ScheduledSequence) -> int:
        """Compute many positions at once: ``state[i] = RATIO**i * (state[0] + sum of what each
        token up to i adds, times RATIO**-j)``, in numbers that wrap around by themselves; returns
        the last of these entries."""
        table, size = scheduled.block_table, self._block_size
        start, end = scheduled.start, scheduled.start + scheduled.count
        state = START
        if start:
            state = self._entries[table[(start - 1) // size] * size + (start - 1) % size]
        for begin in range(start, end, _PIECE):
            token_ids = array("Q", scheduled.token_ids[begin : min(begin + _PIECE, end)])
            added = np.frombuffer(token_ids, np.uint64) * _RATIO_DOWN[: len(token_ids)]
            states = (added.cumsum() + np.uint64(state)) * _RATIO_UP[: len(token_ids)]
            self._put(table, begin, states)
            state = int(states[-1])
        return state

    def _put(self, table: Seq[int], start: int, states: _Words) -> None:
        """Entries of the positions from ``start`` on, a block at a time."""
        size, num_done = self._block_size, 0
        while num_done < len(states):
            block, offset = divmod(start + num_done, size)
            at = table[block] * size + offset
            part = states[num_done : num_done + size - offset]
            self._entry_array[at : at + len(part)] = part
            num_done += len(part)

    def _sample(self, scheduled: ScheduledSequence, state: int) -> Sampled:
        """What follows ``state`` in a sequence that may want more than the likeliest token."""
        sampling = scheduled.sampling
        if sampling.temperature > 0:
            state = mix(state, _draw(scheduled))
        if scheduled.allowed is None and sampling.logprobs is None:
            return self._likeliest(state)
        few = None if scheduled.allowed is None else self._favoured(scheduled)
        token_id = self._token_of(state, 0, few)
        if sampling.logprobs is None:
            return Sampled(token_id)
        others = {
            self._token_of(state, rank, few): None for rank in range(1, 1 + sampling.logprobs)
        }
        others.pop(token_id, None)
        ranked = [token_id, *others][: sampling.logprobs]
        top = tuple((other, -0.25 * (rank + 1)) for rank, other in enumerate(ranked))
        return Sampled(token_id=token_id, logprob=-0.25, top=top)

    def _score(self, scores: PromptScores, scheduled: ScheduledSequence) -> None:
        """How likely the prompt's tokens were. Here the likeliest is what a greedy answer says."""
        entries, table, size = self._entries, scheduled.block_table, self._block_size
        num_top = scheduled.sampling.prompt_logprobs or 0
        for position in scheduled.scored:
            state = entries[table[position // size] * size + position % size]
            ranked = (self._token_of(state, rank) for rank in range(_NUM_RANKED))
            logprobs = {one: -0.25 * (rank + 1) for rank, one in enumerate(dict.fromkeys(ranked))}
            token_id = scheduled.token_ids[position + 1]
            scores.put(
                position + 1,
                Sampled(
                    token_id=token_id,
                    logprob=logprobs.get(token_id, _UNLIKELY),
                    top=tuple(logprobs.items())[:num_top],
                ),
            )

    def _favoured(self, scheduled: ScheduledSequence) -> Seq[int]:
        """What a sequence with few allowed ids chooses from: an end where there may be one, then
        the lowest ids, for there stand quotes, brackets and digits."""
        assert scheduled.allowed is not None, "only asked where something is forbidden"
        bits = np.unpackbits(np.frombuffer(scheduled.allowed, np.uint8), bitorder="little")
        ids = np.flatnonzero(bits).tolist()
        words = [token_id for token_id in ids if token_id not in self.info.eos_token_ids]
        if not words:
            return ids
        may_end = scheduled.token_number >= scheduled.sampling.min_tokens
        ends = [token_id for token_id in ids if token_id in self.info.eos_token_ids]
        return (ends if may_end else []) + words

    def _likeliest(self, state: int) -> Sampled:
        return self._answers[((state * _SPREAD & _MASK) >> _SHIFT) % len(self._answers)]

    def _token_of(self, state: int, rank: int, few: Seq[int] | None = None) -> int:
        """The token that stands at ``rank``, from 0 on, of what may follow ``state``."""
        if few is None:
            return self._likeliest(state + rank).token_id
        x = (state + rank) * _SPREAD & _MASK
        x >>= _SHIFT  # each is half as likely as the one before it
        return few[min((x & -x).bit_length(), len(few)) - 1]


def _answers(token_ids: Seq[int], eos_token_ids: frozenset[int]) -> tuple[Sampled, ...]:
    """What is drawn from, evenly: the tokens of answers and, among so many, an end."""
    num_ends = max(1, round(len(token_ids) / (_ONE_IN - 1))) if eos_token_ids else 0
    ends = [min(eos_token_ids)] * num_ends if eos_token_ids else []
    return tuple(Sampled(token_id) for token_id in [*token_ids, *ends])


def readable_token_ids(vocabulary: Vocabulary) -> list[int]:
    """The ids that show as whole characters, so that made-up answers can be read and printed."""
    return [
        token_id
        for token_id in range(vocabulary.size)
        if not vocabulary.is_silent(token_id)
        and (text := vocabulary.piece(token_id) or vocabulary.token_text(token_id))
        and REPLACEMENT not in text
        and text.isprintable()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTokens:
    """What simulated answers are made of; engines of one model may share it."""

    vocabulary: Vocabulary
    token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> AnswerTokens:
        """Those of a model folder's tokenizer.

        Raises:
            ModelUnsupported: it has no usable one.
        """
        vocabulary = Vocabulary.from_folder(folder)
        token_ids = readable_token_ids(vocabulary)
        if not token_ids:
            raise ModelUnsupported(f"the tokenizer of {folder.name} has no readable token")
        return cls(vocabulary=vocabulary, token_ids=tuple(token_ids))

    @property
    def identity(self) -> str:
        """Equal where the same tokens mean the same."""
        return hashlib.blake2b(pack_ids(self.token_ids), digest_size=16).hexdigest()


def build_simulated(
    tokenizer_folder: Path,
    *,
    answers: AnswerTokens | None = None,
    num_blocks: int = 4096,
    num_host_blocks: int = 0,
    block_size: int = 16,
    context_length: int = 8192,
    eos_token_ids: frozenset[int] | None = None,
    costs: StepCosts = DEFAULT_COSTS,
    token_bytes: int = 0,
    clock: StepClock | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """A simulated engine that answers in the tokens of ``tokenizer_folder``.

    Args:
        tokenizer_folder: a model folder; only its tokenizer is read.
        answers: of that tokenizer, where it was read before.
        num_host_blocks: further slots in the same memory, for a host tier.
        eos_token_ids: None: the tokenizer's own ``eos_token``, if it names one.
        costs: how long its steps take; the engine says so of itself.
        token_bytes: of KV, as others are to be told; 0: the 8 that it has.
        clock: what its steps take their time on.

    Raises:
        ModelUnsupported: the folder has no usable tokenizer.
    """
    answers = answers or AnswerTokens.from_folder(tokenizer_folder)
    vocabulary = answers.vocabulary
    if eos_token_ids is None:
        eos_token_ids = _eos_token_ids(tokenizer_folder, vocabulary)
    layout = f"block_size={block_size} entry_bytes={ENTRY_BYTES}"
    info = EngineInfo(
        kind="simulated",
        context_length=context_length,
        vocab_size=vocabulary.size,
        eos_token_ids=eos_token_ids,
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=block_size * ENTRY_BYTES,
        fingerprint=salt_of("simulated-kv/3", layout, answers.identity).hex(),
        simulated_token_bytes=token_bytes,
    )
    pool = SharedPool(num_blocks + num_host_blocks, info.block_bytes)
    runner = SimulatedRunner(pool, info, answers.token_ids, costs, clock)
    return Engine(runner, pool, vocabulary, config, StepMeter.of_known(costs))


def _eos_token_ids(folder: Path, vocabulary: Vocabulary) -> frozenset[int]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return frozenset()
    try:
        token = json.loads(path.read_bytes()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ModelUnsupported(f"{path.name} of {folder.name}: {error}") from error
    if isinstance(token, dict):  # older folders write the token with its flags
        token = token.get("content")
    token_id = vocabulary.token_id(token) if isinstance(token, str) else None
    return frozenset() if token_id is None else frozenset({token_id})
