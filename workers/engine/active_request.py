"""A request inside the engine: its choices, its root, and what can be said about it as a whole."""

from __future__ import annotations

from schemas.errors import ContextTooLong, InvalidRequest
from workers.engine.api import EngineInfo, EngineRequest, FinishedRequest, HeldRequest
from workers.engine.choice import Choice
from workers.engine.grammar import Grammars
from workers.engine.output import OutputProcessor, Vocabulary
from workers.engine.prompt_scores import PromptScores
from workers.engine.sequence import ROOT, Group, Sequence, num_blocks_for


class ActiveRequest:
    """Built from an :class:`EngineRequest`, tokens that exist already replayed.

    ``group.root`` is set when the request computes its prompt apart from its choices: several
    choices run, or the prompt of several is to be held.
    """

    def __init__(
        self,
        request: EngineRequest,
        place: int,
        info: EngineInfo,
        vocabulary: Vocabulary,
        grammars: Grammars,
    ) -> None:
        self.key = request.key
        self.request = request
        self.group = Group(
            key=request.key,
            place=place,
            sampling=request.sampling,
            salt=request.salt,
            overtakes=request.overtakes,
        )
        self._block_size = info.block_size
        self.choices = [
            self._choice(index, info, vocabulary, grammars) for index in range(request.sampling.n)
        ]
        self.group.scores = self._scores()
        if self._needs_root():
            self.group.root = self._sequence(ROOT)
            self.group.keeps_root = request.hold_after_first

    def _sequence(self, index: int) -> Sequence:
        prompt_ids = self.request.prompt_ids
        return Sequence(
            group=self.group,
            index=index,
            token_ids=list(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
        )

    def _choice(
        self, index: int, info: EngineInfo, vocabulary: Vocabulary, grammars: Grammars
    ) -> Choice:
        request, sampling = self.request, self.request.sampling
        output = OutputProcessor(vocabulary, request.prompt_ids, sampling.stop, sampling.min_tokens)
        matcher = grammars.matcher(sampling)
        choice = Choice(
            self._sequence(index),
            output,
            sampling,
            info,
            matcher,
            is_held_next=request.hold_after_first,
        )
        if request.finished and request.finished[index]:
            choice.finish_reason = request.finished[index]
        if request.tokens:
            choice.replay(request.tokens[index])
        return choice

    def _scores(self) -> PromptScores | None:
        """For choices that have their first token, the scores are out already."""
        if self.request.sampling.prompt_logprobs is None:
            return None
        if all(choice.sequence.num_tokens for choice in self.running_choices):
            return None
        return PromptScores(self.request.prompt_ids)

    def _needs_root(self) -> bool:
        if self.request.sampling.n == 1 or self.is_finished:
            return False
        return self.request.hold_after_first or len(self.running_choices) > 1

    @property
    def running_choices(self) -> list[Choice]:
        """Those that have not ended."""
        return [choice for choice in self.choices if choice.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """Whether all choices ended."""
        return not self.running_choices

    @property
    def sequences(self) -> list[Sequence]:
        """All that may own blocks."""
        root = self.group.root
        return [choice.sequence for choice in self.choices] + ([root] if root else [])

    @property
    def num_blocks_needed(self) -> int:
        """The size of the smallest pool in which it can be computed alone."""
        size = self._block_size
        running = self.running_choices
        if not running:
            return 0
        if not self.request.hold_after_first:
            # The last token is sampled, never computed.
            return max(num_blocks_for(choice.max_length - 1, size) for choice in running)
        lengths = [len(choice.sequence.token_ids) for choice in running]
        if self.group.root is None:
            return max(num_blocks_for(length, size) for length in lengths)
        num_prompt = len(self.request.prompt_ids)
        own = [num_blocks_for(n, size) - min(num_prompt, n - 1) // size for n in lengths]
        return num_blocks_for(num_prompt, size) + max(own)

    def take_import(self) -> tuple[Sequence, tuple[int, ...]]:
        """Give the imported blocks to the sequence they are for. One whose scores are wanted has
        no use for them.

        Returns:
            That sequence, and blocks it has no use for.
        """
        sequence = self.group.root or self.running_choices[0].sequence
        most = len(sequence.token_ids) - (0 if sequence.is_root else 1)
        if self.group.scores is not None:
            most = 0
        sequence.num_computed_tokens = min(self.request.num_imported_tokens, most)
        blocks = self.request.imported_blocks
        num_kept = num_blocks_for(sequence.num_computed_tokens, self._block_size)
        sequence.block_table = list(blocks[:num_kept])
        return sequence, blocks[num_kept:]

    # ---- holding -------------------------------------------------------------------------

    @property
    def can_be_held(self) -> bool:
        """Whether every running choice has its token and the common KV is complete."""
        if not self.request.hold_after_first or self.is_finished or self.group.is_held:
            return False
        if not all(choice.has_sampled for choice in self.running_choices):
            return False
        root = self.group.root
        return root is None or root.num_uncomputed_tokens == 0

    def hold(self) -> HeldRequest:
        """From now on its blocks stay."""
        self.group.is_held = True
        sequence = self.group.root or self.running_choices[0].sequence
        num_tokens = sequence.num_computed_tokens
        return HeldRequest(
            key=self.key,
            blocks=tuple(sequence.block_table[: num_blocks_for(num_tokens, self._block_size)]),
            num_tokens=num_tokens,
            num_cached_tokens=self.group.num_cached_tokens,
            num_host_tokens=self.group.num_host_tokens,
        )

    def finished(self) -> FinishedRequest:
        """Its end, once all choices ended."""
        return FinishedRequest(
            key=self.key,
            num_tokens=tuple(choice.sequence.num_tokens for choice in self.choices),
            finish_reasons=tuple(choice.finish_reason or "" for choice in self.choices),
            num_cached_tokens=self.group.num_cached_tokens,
            num_host_tokens=self.group.num_host_tokens,
        )


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Refuse what can't be computed, whatever else is going on.

    Raises:
        ContextTooLong: the prompt leaves no room in the context.
        InvalidRequest: no prompt, or an id outside the vocabulary.
        ValueError: the request contradicts itself.
    """
    key, n, prompt_ids = request.key, request.sampling.n, request.prompt_ids
    if len(request.tokens) not in (0, n) or len(request.finished) not in (0, n):
        raise ValueError(f"{key} has {n} choices, but tokens or finish reasons for others")
    if request.num_imported_tokens > len(request.imported_blocks) * info.block_size:
        raise ValueError(f"{key} imports more tokens than its blocks hold")
    if not prompt_ids:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if max(prompt_ids) >= info.vocab_size:
        raise InvalidRequest("the prompt has an id outside the vocabulary", param="prompt")
    if len(prompt_ids) >= info.context_length:
        raise ContextTooLong(
            f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of "
            f"{info.context_length}",
            param="prompt",
        )
