"""A runner without a model: tokens from a hash of what came before, times from a cost model.

Its KV is real in the way that matters. The KV of a token is 8 bytes, the chained hash of all
tokens up to it, and it is read back from the pool to go on::

    pool[slot(i)] = mix(pool[slot(i - 1)], token_ids[i])
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
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from infra.transport.shm import SharedPool
from pipeline.cost_model import chunk_squares, decode_step_ms, prefill_step_ms
from pipeline.prefix_hash import salt_of
from schemas.codec import pack_ids
from schemas.errors import ModelUnsupported
from schemas.profiles import StepCosts
from workers.engine.api import EngineInfo, InSharedPool, Sampled, ScheduledSequence
from workers.engine.engine import Engine
from workers.engine.output import REPLACEMENT, Vocabulary
from workers.engine.scheduler import EngineConfig
from workers.step_meter import StepMeter

ENTRY_BYTES = 8  # the KV of one token
START = 0x9E3779B97F4A7C15  # stands before the first token: 2**64 divided by the golden ratio

_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # SplitMix64's
_ONE_IN = 200  # an answer ends by itself after about so many tokens
_NUM_RANKED = 32  # tokens that a made-up distribution tells apart; a prompt's others are unlikely
_UNLIKELY = -12.0
_WORTH_ARRAYS = 16  # sequences: from here on arrays are faster than one at a time

_Words = npt.NDArray[np.uint64]


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
    decoding = [s.start for s in batch if s.count == 1 and s.start > 0]
    num_decoding = len(decoding)
    decode_ms = decode_step_ms(costs, num_decoding, sum(decoding) + num_decoding)
    if num_decoding == len(batch):
        return decode_ms
    chunks = [s for s in batch if s.count != 1 or s.start == 0]
    num_squares = sum(chunk_squares(s.start, s.start + s.count) for s in chunks)
    return decode_ms + prefill_step_ms(costs, sum(s.count for s in chunks), num_squares)


def mix(state: int, value: int) -> int:
    """64 bits that depend on all bits of both (the finalizer of SplitMix64)."""
    x = ((state ^ value) * _FIRST + START) & _MASK
    x = ((x ^ (x >> 30)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _mix_all(states: _Words, values: _Words | np.uint64) -> _Words:
    """:func:`mix` of many at once: unsigned words wrap around by themselves."""
    x = (states ^ values) * np.uint64(_FIRST) + np.uint64(START)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def _draw(scheduled: ScheduledSequence) -> tuple[int, int, int]:
    """What a draw depends on, beside the tokens before it."""
    seed = (scheduled.sampling.seed or 0) & _MASK
    return seed, scheduled.index, scheduled.token_number


class StepClock:
    """When a step begins, and the waiting for its end: in real time."""

    def begin(self) -> float:
        """When the step that is computed now began, on the monotonic clock."""
        return time.monotonic()

    def end(self, end_s: float) -> None:
        """The step is over at ``end_s``; returns then, or at once where computing took longer."""
        if (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)


_REAL_TIME: Final = StepClock()


class SimulatedRunner(InSharedPool):
    """Implements :class:`workers.engine.api.Runner` over a pool of 8-byte entries.

    Args:
        pool: its block_bytes are ``info.block_size * ENTRY_BYTES``; of its slots it uses the first
            ``info.num_blocks``.
        token_ids: what answers are made of, apart from the end.
        costs: how long its steps take.
        clock: what they take it on.
    """

    def __init__(
        self,
        pool: SharedPool,
        info: EngineInfo,
        token_ids: Seq[int],
        costs: StepCosts,
        clock: StepClock = _REAL_TIME,
    ) -> None:
        self.info = info
        self._pool = pool
        self._token_ids = tuple(token_ids)
        self._eos = min(info.eos_token_ids) if info.eos_token_ids else None
        self._costs = costs
        self._clock = clock
        self._block_size = info.block_size
        self._slots = pool.slots[: info.num_blocks]
        self._entries = self._slots.reshape(-1).data.cast("Q")
        self._entry_array = self._slots.reshape(-1).view(np.uint64)
        self._token_array = np.array(self._token_ids, np.int64)

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """Compute the batch; one result per sequence that samples, in batch order."""
        end_s = self._clock.begin() + batch_ms(self._costs, batch) / 1e3
        sampled = [one for one in self._compute(batch) if one is not None]
        self._clock.end(end_s)
        return sampled

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another."""
        self._pool.copy_block(source, target)

    def _compute(self, batch: Seq[ScheduledSequence]) -> list[Sampled | None]:
        rows = [  # one more token of a sequence, any of the vocabulary, and no logprobs
            row
            for row, s in enumerate(batch)
            if s.count == 1
            and s.start > 0
            and s.sample
            and s.allowed is None
            and s.sampling.logprobs is None
        ]
        if len(rows) < _WORTH_ARRAYS:
            return [self._compute_one(scheduled) for scheduled in batch]
        if len(rows) == len(batch):
            return [*self._decode_together(batch)]
        together = self._decode_together([batch[row] for row in rows])
        found = dict(zip(rows, together, strict=True))
        return [found.get(row) or self._compute_one(s) for row, s in enumerate(batch)]

    def _compute_one(self, scheduled: ScheduledSequence) -> Sampled | None:
        state = self._write_entries(scheduled)
        self._score(scheduled)
        return self._sample(scheduled, state) if scheduled.sample else None

    def _decode_together(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """What :meth:`_compute_one` gives for each of ``batch``, which all decode plainly."""
        size = self._block_size
        last = np.array([s.token_ids[s.start] for s in batch], np.uint64)
        before = [s.block_table[(s.start - 1) // size] for s in batch]
        here = [s.block_table[s.start // size] for s in batch]
        starts, blocks = np.array([s.start for s in batch]), np.array((before, here)) * size
        states = _mix_all(self._entry_array[blocks[0] + (starts - 1) % size], last)
        self._entry_array[blocks[1] + starts % size] = states
        warm = [row for row, s in enumerate(batch) if s.sampling.temperature > 0]
        if warm:
            drawn = states[warm]
            for values in zip(*(_draw(batch[row]) for row in warm), strict=True):
                drawn = _mix_all(drawn, np.array(values, np.uint64))
            states[warm] = drawn
        states = _mix_all(states, np.uint64(1))
        chosen = self._token_array[
            (states // np.uint64(_ONE_IN) % np.uint64(len(self._token_ids))).astype(np.int64)
        ]
        if self._eos is not None:
            chosen[states % np.uint64(_ONE_IN) == 0] = self._eos
        return [Sampled(token_id=token_id) for token_id in chosen.tolist()]

    def _write_entries(self, scheduled: ScheduledSequence) -> int:
        """Compute the positions of this step; returns the last entry."""
        entries, table, size = self._entries, scheduled.block_table, self._block_size
        token_ids, start = scheduled.token_ids, scheduled.start
        state = START
        if start:
            state = entries[table[(start - 1) // size] * size + (start - 1) % size]
        for position in range(start, start + scheduled.count):
            # mix(), written out: a call for each token of a prompt is a third of what it costs
            x = ((state ^ token_ids[position]) * _FIRST + START) & _MASK
            x = ((x ^ (x >> 30)) * _SECOND) & _MASK
            state = x ^ (x >> 31)
            entries[table[position // size] * size + position % size] = state
        return state

    def _sample(self, scheduled: ScheduledSequence, state: int) -> Sampled:
        sampling = scheduled.sampling
        if sampling.temperature > 0:
            for value in _draw(scheduled):
                state = mix(state, value)
        few = None if scheduled.allowed is None else self._favoured(scheduled)
        token_id = self._token_of(mix(state, 1), few)
        if sampling.logprobs is None:
            return Sampled(token_id=token_id)
        others = {
            self._token_of(mix(state, rank), few): None for rank in range(2, 2 + sampling.logprobs)
        }
        others.pop(token_id, None)
        ranked = [token_id, *others][: sampling.logprobs]
        top = tuple((other, -0.25 * (rank + 1)) for rank, other in enumerate(ranked))
        return Sampled(token_id=token_id, logprob=-0.25, top=top)

    def _score(self, scheduled: ScheduledSequence) -> None:
        """How likely the prompt's tokens were. Here the likeliest is what a greedy answer says."""
        if scheduled.scores is None:
            return
        entries, table, size = self._entries, scheduled.block_table, self._block_size
        num_top = scheduled.sampling.prompt_logprobs or 0
        for position in scheduled.scored:
            state = entries[table[position // size] * size + position % size]
            ranked = (self._token_of(mix(state, 1 + rank), None) for rank in range(_NUM_RANKED))
            logprobs = {one: -0.25 * (rank + 1) for rank, one in enumerate(dict.fromkeys(ranked))}
            token_id = scheduled.token_ids[position + 1]
            scheduled.scores.put(
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

    def _token_of(self, state: int, few: Seq[int] | None) -> int:
        if few is not None:  # each half as likely as the one before it
            return few[min((state & -state).bit_length(), len(few)) - 1]
        if self._eos is not None and state % _ONE_IN == 0:
            return self._eos
        return self._token_ids[state // _ONE_IN % len(self._token_ids)]


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
    clock: StepClock = _REAL_TIME,
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
        fingerprint=salt_of("simulated-kv/1", layout, answers.identity).hex(),
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
