"""What sequences have of a simulated engine's pool: shared pieces, and blocks of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from loadgen.simulate.extents import ExtentPool
from loadgen.simulate.sequence import Sequence
from pipeline.cost_model import chunk_squares, prefill_step_ms
from schemas.kv_events import HASH_BYTES
from schemas.profiles import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is: its costs and its bounds."""

    costs: StepCosts
    num_blocks: int
    block_size: int
    blocks_per_piece: int
    max_num_sequences: int
    max_batch_tokens: int


class Holdings:
    """Gives blocks of ``pool`` to sequences, and takes them back."""

    def __init__(self, spec: EngineSpec, pool: ExtentPool) -> None:
        self.spec = spec
        self.pool = pool

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens fill; the last may be partly full."""
        return -(-num_tokens // self.spec.block_size)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let it have blocks for so many tokens; False: there is no room."""
        missing = self.blocks_for(num_tokens) - sequence.num_blocks
        if missing > 0:
            if not self.pool.allocate(missing):
                return False
            sequence.num_private += missing
        return True

    def take_prefix(self, sequence: Sequence) -> None:
        """Share what is known of its prompt, all but the last token: that one must be computed."""
        size, per_piece = self.spec.block_size, self.spec.blocks_per_piece
        most = (sequence.num_tokens - 1) // size
        sequence.extents, found = self.pool.take(sequence.pieces, most)
        sequence.num_shared = found
        sequence.num_computed = found * size
        sequence.num_registered = found // per_piece

    def register(self, sequence: Sequence) -> None:
        """Make findable what there is of its prompt."""
        per_piece = self.spec.blocks_per_piece
        num_full = min(sequence.num_computed, sequence.num_prompt) // self.spec.block_size
        while sequence.num_registered < len(sequence.pieces):
            at = sequence.num_registered
            num = min(per_piece, num_full - at * per_piece)
            if num <= 0:
                return
            parent = sequence.pieces[at - 1] if at else b""
            self._share(sequence, sequence.pieces[at], parent, num)
            if num < per_piece:
                return  # the rest of it comes with a later chunk, or with nobody
            sequence.num_registered += 1

    def keep_answer(self, sequence: Sequence) -> None:
        """Blocks of an answer can be found as well, and take room until others need it. In a trace
        nobody asks for them: what a next turn says is named anew."""
        per_piece = self.spec.blocks_per_piece
        num_left = sequence.num_computed // self.spec.block_size
        num_left -= sequence.num_prompt // self.spec.block_size
        parent = sequence.pieces[-1]
        while num_left > 0:
            piece = blake2b(sequence.key.encode(), key=parent, digest_size=HASH_BYTES).digest()
            self._share(sequence, piece, parent, min(per_piece, num_left))
            parent = piece
            num_left -= per_piece

    def _share(self, sequence: Sequence, piece: bytes, parent: bytes, num_blocks: int) -> None:
        last = sequence.extents[-1] if sequence.extents else None
        if last is not None and last.name == piece:
            moved = self.pool.grow(last, parent, num_blocks)
        else:
            extent, moved = self.pool.register(piece, parent, num_blocks)
            sequence.extents += [extent] if extent is not None else []
        sequence.num_private -= moved
        sequence.num_shared += moved

    def drop(self, sequence: Sequence) -> None:
        """It gives all of them back, and has computed nothing."""
        self.pool.release(sequence.extents)
        self.pool.free(sequence.num_private)
        sequence.extents = []
        sequence.num_private = sequence.num_shared = 0
        sequence.num_computed = sequence.num_registered = 0

    def store(self, pieces: tuple[bytes, ...], num_blocks: int) -> bool:
        """Blocks of a prompt's beginning came from elsewhere, and can be found from now on; False:
        there was no room for them."""
        taken, found = self.pool.take(pieces, num_blocks)
        loose = Sequence(key="", age=0, pieces=pieces, num_prompt=0, num_output=0, holds=False)
        loose.extents, loose.num_shared = taken, found
        has_room = self.pool.allocate(max(0, num_blocks - found))
        if has_room:
            loose.num_private = max(0, num_blocks - found)
            loose.num_tokens = loose.num_computed = num_blocks * self.spec.block_size
            loose.num_prompt = loose.num_tokens
            self.register(loose)
        self.drop(loose)
        return has_room

    def computing_ms(self, sequences: Iterable[Sequence]) -> float:
        """How long it takes to compute these, in steps as full as may be; what is found takes
        nothing."""
        size, num_tokens, num_squares = self.spec.block_size, 0, 0
        for one in sequences:
            start = one.num_computed
            if not one.num_blocks:
                start = self.pool.num_found(one.pieces, (one.num_tokens - 1) // size) * size
            num_tokens += one.num_tokens - start
            num_squares += chunk_squares(start, one.num_tokens)
        num_steps = -(-num_tokens // self.spec.max_batch_tokens)
        return prefill_step_ms(self.spec.costs, num_tokens, num_squares, num_steps=num_steps)
