"""Sequences: what is computed, how far it is, and where its KV lies.

There are no phases. A sequence has tokens, and a counter of those whose KV is in the pool; prefill,
decode, recomputing after a preemption and going on after an import are the same thing: computing
the rest. A token is sampled whenever the last position was computed.

A request of several choices computes its prompt once, as its *root*: a sequence of the prompt
alone, which never samples. The choices start as forks of it::

    root      [b0][b1][b2 |  ]     prompt; the last block is partly full
    choice 0  [b0][b1][b7 | x]     b0 and b1 are shared, b7 started as a copy of b2
    choice 1  [b0][b1][b9 | y]
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from pipeline.prefix_hash import iter_prefix_hashes
from schemas.codec import pack_ids
from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence
from workers.engine.prompt_scores import PromptScores

if TYPE_CHECKING:
    from workers.engine.choice import Choice

ROOT = -1  # the index of a root, which is no choice


class Group(msgspec.Struct, eq=False, kw_only=True):
    """What the sequences of one request have in common, as far as scheduling goes."""

    key: str
    place: int  # in line: requests are served in this order
    sampling: SamplingParams
    salt: bytes
    overtakes: bool = False  # no prompt behind it makes the step longer that ends its own
    keeps_root: bool = False  # the root is what will be held, so it is not merely a short cut
    is_held: bool = False  # blocks stay until release
    root: Sequence | None = None
    pending: list[Sequence] = []  # choices that wait for the root
    num_unstarted: int = 0  # choices that never ran: while there are any, the root is of use
    has_started: bool = False  # computed here, or at least begun elsewhere and imported
    num_cached_tokens: int = 0  # of the prompt, found in the pool when the request first ran
    num_host_tokens: int = 0  # of these, those that had been brought there out of the host tier
    scores: PromptScores | None = None  # of the prompt, where they are wanted

    @property
    def has_format(self) -> bool:
        """Whether the answers keep to a ``response_format``."""
        return self.sampling.response_format is not None

    @property
    def scores_to_fill(self) -> PromptScores | None:
        """The scores, while some are missing."""
        return self.scores if self.scores is not None and not self.scores.is_complete else None


class Sequence(ScheduledSequence, eq=False, kw_only=True):
    """One choice (or the root) of a request, and its share of the step that the scheduler planned
    last: one object for both, for most are in every step.

    ``age`` is its place in line: smaller is older.

    Slot ``block_table[i]`` has positions ``[i * block_size, (i + 1) * block_size)``. The table
    covers the computed tokens and may reach further.
    """

    group: Group
    token_ids: list[int]  # prompt and tokens so far
    block_table: list[int] = msgspec.field(default_factory=list)
    num_computed_tokens: int = 0
    start: int = 0
    count: int = 0
    sample: bool = False
    sampling: SamplingParams = SamplingParams()  # those of the group
    copy: tuple[int, int] | None = None  # source and target slot, before the step runs
    has_started: bool = False
    has_looked_below: bool = False  # into the host tier, before its turn
    num_promotions: int = 0  # begun for it, since it last owned blocks
    promoted: set[bytes] = msgspec.field(default_factory=set)  # blocks that they brought
    hashes: list[bytes] = msgspec.field(default_factory=list)  # see prefix_hashes()
    age: tuple[int, int] = (0, 0)
    choice: Choice | None = None  # takes its tokens while the engine runs it; a root has none

    def __post_init__(self) -> None:
        self.sampling = sampling = self.group.sampling
        self.is_greedy = (
            sampling.temperature <= 0
            and sampling.logprobs is None
            and sampling.prompt_logprobs is None
            and sampling.response_format is None
        )
        self.age = (self.group.place, self.index)

    @property
    def is_root(self) -> bool:
        """Whether it only computes the prompt for others."""
        return self.index == ROOT

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing; one in the steady state of decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether one position is left, after others."""
        num_computed = self.num_computed_tokens
        return num_computed > 0 and len(self.token_ids) - num_computed == 1

    @property
    def num_tokens(self) -> int:
        """Generated tokens, those that came with the request included."""
        return len(self.token_ids) - self.num_prompt_tokens

    def prefix_hashes(self, num_blocks: int, block_size: int) -> Seq[bytes]:
        """The chained hashes of its first ``num_blocks`` full blocks, each computed once."""
        hashes = self.hashes
        if len(hashes) < num_blocks:
            ids = self.token_ids[len(hashes) * block_size : num_blocks * block_size]
            parent = hashes[-1] if hashes else self.group.salt
            hashes += iter_prefix_hashes(pack_ids(ids), block_size, parent)
        return hashes[:num_blocks]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks ``num_tokens`` tokens fill; the last may be partly full."""
    return -(-num_tokens // block_size)
