"""One request of a trace on its way through a simulated fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadgen.measure import RequestResult
from loadgen.simulate.prompts import block_runs
from pipeline.prefix_hash import request_salt
from schemas.requests import RequestRecord, SamplingParams, Slo

if TYPE_CHECKING:
    from loadgen.simulate.decode_batch import StepLog

REVISION = "simulated"
FINGERPRINT = "simulated-kv"  # of all workers: every one can read every other one's blocks


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What it asks, what has become of it.

    ``segments`` say where its tokens came from, as those of a sequence. ``max_tokens`` is what the
    mesh is told; how long the answer will be, nobody knows before it ends.
    """

    number: int
    request_id: str
    due_s: float
    num_prompt: int
    num_output: int
    max_tokens: int
    tenant: str
    pieces: tuple[bytes, ...]
    blocks_per_piece: int
    block_size: int
    slo: Slo
    result: RequestResult
    segments: list[tuple[StepLog, int, int] | float] = field(default_factory=list)
    num_cached: int = 0
    num_placed: int = 0

    @property
    def num_blocks(self) -> int:
        """Full blocks of its prompt."""
        return self.num_prompt // self.block_size

    def runs(self) -> Iterator[Sequence[bytes]]:
        """The hashes of its prompt, as :class:`pipeline.prefixes.Prefixes` takes them."""
        return block_runs(self.pieces, self.blocks_per_piece, self.num_blocks)

    def clamp(self, max_tokens: int) -> None:
        """It may not become longer than that."""
        self.max_tokens = min(self.max_tokens, max_tokens)
        self.num_output = min(self.num_output, max_tokens)

    def record(self, served: str) -> RequestRecord:
        """What admission writes of it; ``served`` is the pool. Its tokens are zeros, and take room:
        so it is made anew each time."""
        return RequestRecord(
            request_id=self.request_id,
            model=served,
            revision=REVISION,
            served=served,
            prompt_ids=bytes(4 * self.num_prompt),
            sampling=SamplingParams(max_tokens=self.max_tokens, seed=self.number),
            reader="bridge",
            admitted_unix_ms=0,
            deadline_unix_ms=0,
            tenant=self.tenant,
            slo=self.slo,
        )


def salt_of_tenant(tenant: str) -> bytes:
    """What the hashes of a tenant's prompts begin with; nobody else's are equal to them."""
    record = RequestRecord(
        request_id="",
        model="",
        revision=REVISION,
        served="",
        prompt_ids=b"",
        sampling=SamplingParams(),
        reader="",
        admitted_unix_ms=0,
        deadline_unix_ms=0,
        tenant=tenant,
    )
    return request_salt(record, FINGERPRINT)
