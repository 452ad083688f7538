"""The seams of the engine: what a worker asks of it, and what it asks of a runner.

A worker speaks to :class:`workers.engine.engine.Engine` through the dataclasses here; the engine
speaks to a :class:`Runner` (torch or simulated). An engine is used by one thread at a time, and
its steps are made by one thread.

What is made per request, step or token is a msgspec struct: those cost a fifth of a frozen
dataclass to make.

A *request* has one or more *choices* (``sampling.n``); each choice is one sequence. Token numbers
count from 0 per choice. ``key`` names a request inside the engine: unique per (request, epoch).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from schemas.control import Load
from schemas.requests import SamplingParams
from schemas.tokens import TokenLogprob

if TYPE_CHECKING:
    from workers.engine.prompt_scores import PromptScores


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute.

    ``tokens`` are tokens that exist already, per choice (a take-over, or the first token that
    came with a handle): they are never sampled again, but count against ``max_tokens``, enter
    penalties, stop strings and the detokenizer. Empty: no choice has any.
    ``finished`` gives, per choice, the reason for which it ended before; "" while it runs.

    ``hold_after_first``: the prefill role. Every running choice samples exactly one more token;
    then, if any choice still runs, the request is *held*: nothing more is computed, its blocks
    stay as they are and pinned until ``release``. What is held is the common part of all
    choices: prompt and tokens for one choice, the prompt for several.
    ``imported_blocks``: blocks got from ``reserve`` and filled from outside; they hold the KV of
    the first ``num_imported_tokens`` tokens of prompt and tokens.

    ``overtakes``: it stands before others in line (``workers/engine/line.py``), and the step that
    computes the rest of its prompt takes no prompt behind it along, which would make it longer.
    """

    key: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams  # seed and max_tokens are set
    salt: bytes = b""  # of the prefix hash: what must not share blocks
    tokens: tuple[tuple[int, ...], ...] = ()
    finished: tuple[str, ...] = ()
    hold_after_first: bool = False
    imported_blocks: tuple[int, ...] = ()
    num_imported_tokens: int = 0
    overtakes: bool = False


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """One new token of one choice, and the text that became visible with it.

    ``prompt_logprobs``: with token 0 of each choice, in the form of a ``TokenDelta``.
    """

    key: str
    index: int
    number: int
    token_id: int
    text: str
    finish_reason: str | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits with its blocks pinned; see ``EngineRequest.hold_after_first``."""

    key: str
    blocks: tuple[int, ...]  # slots, in token order; the last may be partly full
    num_tokens: int  # whose KV the blocks hold
    num_cached_tokens: int
    num_host_tokens: int = 0  # of these, how many came out of the host tier


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All choices ended; the request's blocks are released."""

    key: str
    num_tokens: tuple[int, ...]  # per choice, tokens that existed before included
    finish_reasons: tuple[str, ...]
    num_cached_tokens: int
    num_host_tokens: int = 0  # of these, how many came out of the host tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """The engine raised for this request alone; its blocks are released, others go on."""

    key: str
    message: str


class StepReport(msgspec.Struct):
    """What one step brought, or several that followed each other, in the order in which it
    happened."""

    outputs: list[TokenOutput] = []
    held: list[HeldRequest] = []
    finished: list[FinishedRequest] = []
    failed: list[FailedRequest] = []
    num_computed_tokens: int = 0  # token positions run through the model in this step
    steps_s: list[float] = []  # how long each took, silent ones too

    @property
    def is_urgent(self) -> bool:
        """Whether somebody waits for more than the next of many tokens: for a first one, an end,
        or a way on."""
        if self.finished or self.held or self.failed:
            return True
        return any(output.number == 0 for output in self.outputs)

    @property
    def is_silent(self) -> bool:
        """Whether it tells nothing of any request."""
        return not (self.outputs or self.held or self.finished or self.failed)

    def join(self, later: StepReport) -> None:
        """Add what the next step brought."""
        self.outputs += later.outputs
        self.held += later.held
        self.finished += later.finished
        self.failed += later.failed
        self.num_computed_tokens += later.num_computed_tokens
        self.steps_s += later.steps_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a loaded engine that others must agree on or may show."""

    kind: str  # "native", "torch" (general path), "cuda" or "simulated"
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int
    num_blocks: int
    block_bytes: int
    fingerprint: str  # readers of our blocks must have the same
    dtype: str = ""  # of the weights; "" where there are none
    device: str = ""  # its name, if it is not the CPU
    simulated_token_bytes: int = 0  # of KV, as others are to be told; 0: those that it has

    @property
    def label(self) -> str:
        """What it is called before people, such as "native q4"."""
        return f"{self.kind} {self.dtype}".rstrip()

    @property
    def kv_token_bytes(self) -> int:
        """What the KV of one token takes: of the model that it stands for, if it is simulated."""
        return self.simulated_token_bytes or self.block_bytes // self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """How long prompt and answer of any one request may be. A block is set aside: choices of
        one request that part in the middle of a block each get a copy of it."""
        most = max(self.num_blocks - 1, 1) * self.block_size
        return min(self.context_length, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStates:
    """Blocks of the pool by what they are there for; they sum to its size."""

    free: int
    cached: int  # found by hash, evicted when there is need
    active: int  # of sequences, and of requests whose blocks are still to be filled
    leased: int  # of requests that are held for a reader
    arriving: int  # between the tiers


class EngineApi(Protocol):
    """What a worker service needs, called by way of :class:`workers.engine.thread.EngineThread`."""

    info: EngineInfo

    def prepare(self, sampling: SamplingParams) -> None:
        """Do beforehand what would make ``add`` take long: compile a ``response_format``. Unlike
        the rest, from any thread at any time.

        Raises:
            InvalidRequest: it can't be kept.
        """

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            ContextTooLong: prompt and tokens leave no room in the context.
            NoCapacity: it could never fit the pool, even alone.
            InvalidRequest: its ``response_format`` can't be kept.
        """

    def reserve(self, key: str, num_tokens: int) -> tuple[int, ...] | None:
        """Blocks for ``num_tokens`` tokens, to be filled from outside and named in a later
        ``add`` with the same key; None when there is no room now."""

    def release(self, key: str) -> None:
        """Give back whatever ``key`` holds (running, reserved or held); unknown keys are fine."""

    def step(self) -> StepReport:
        """Schedule, run, sample, report. Returns an empty report when there is no work."""

    def collect(self) -> None:
        """Take in what was copied between the tiers; for whoever hears that a copy has ended."""

    def has_work(self) -> bool:
        """Whether ``step`` would compute something."""

    def load(self) -> Load:
        """How busy it is."""

    def block_states(self) -> BlockStates:
        """What its blocks are there for."""

    def check_invariants(self) -> None:
        """Raise AssertionError when the books are wrong."""


class ScheduledSequence(msgspec.Struct, kw_only=True):
    """A sequence's share of one step: positions ``[start, start + count)`` are computed. The engine
    makes the next step's of the same object, so nobody keeps it; a runner changes nothing in it.

    ``block_table`` covers them all; position p lives in slot ``block_table[p // block_size]`` at
    offset ``p % block_size``. When ``sample`` is set, the logits of the last position give token
    number ``len(token_ids) - num_prompt_tokens`` of choice ``index``.
    """

    token_ids: Seq[int]  # prompt and tokens so far
    num_prompt_tokens: int
    block_table: Seq[int]
    start: int
    count: int
    sample: bool
    sampling: SamplingParams
    index: int  # the choice
    allowed: bytes | None = None  # ids that may come next (bit i % 8 of byte i // 8); None: all
    scores: PromptScores | None = None  # where the runner notes those of ``scored``; None: nowhere
    is_greedy: bool = False  # wants the likeliest token and no more: no scores, logprobs or format

    @property
    def token_number(self) -> int:
        """The number of the token that this step would sample."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def scored(self) -> range:
        """The positions of this step whose logits say how likely the prompt's next token was."""
        if self.scores is None:
            return range(self.start, self.start)
        end = min(self.start + self.count, self.num_prompt_tokens - 1)
        return range(self.start, max(self.start, end))


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sampled token, or one that the prompt has; ``logprob`` and ``top`` only when the request
    asks for logprobs."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Runner(Protocol):
    """The part of an engine that knows a model. It writes KV into the pool it was given, or into
    one of its own whose blocks it moves to and from that pool when it is told to."""

    info: EngineInfo

    def execute(self, batch: Seq[ScheduledSequence]) -> list[Sampled]:
        """Compute the batch; one result per sequence with ``sample`` set, in batch order. The
        scores of a prompt are put where its sequence says.

        What a sequence gets does not depend on what else is in the batch (bit for bit in the
        simulated runner; up to rounding in torch).

        Raises:
            RunnerLost: nothing can be computed any more. Whatever else is raised is blamed on a
                request of the batch.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Copy one slot's bytes to another (fork of a partly full block)."""

    def export_blocks(self, blocks: Seq[int]) -> None:
        """Bring what was computed into these slots of the shared pool; others read it there."""

    def import_blocks(self, blocks: Seq[int]) -> None:
        """Take over what others wrote into these slots of the shared pool."""

    def read_block(self, block: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes to ``into``. From any thread, also during a step: they are of use
        if the block's slot has the generation afterwards that it had when the block was full."""

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy bytes into a block that nobody else writes or reads. From any thread, also during
        a step."""


class RunnerLost(Exception):
    """A runner can compute no more, whatever the request: the engine is at its end."""


class InSharedPool:
    """Base of runners that compute in the shared pool itself: there is nothing to move.

    Attributes:
        _slots: [num_blocks, block_bytes] uint8, what they compute in.
    """

    _slots: npt.NDArray[np.uint8]

    def export_blocks(self, blocks: Seq[int]) -> None:
        """They are there."""

    def import_blocks(self, blocks: Seq[int]) -> None:
        """They are there."""

    def read_block(self, block: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy a block out; the interpreter's lock is not held meanwhile."""
        into[:] = self._slots[block]

    def write_block(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy a block in; the interpreter's lock is not held meanwhile."""
        self._slots[block] = data
