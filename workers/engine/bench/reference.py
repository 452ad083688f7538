"""The same steps by transformers: its own modules, attention and cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from workers.engine.loader import load_model


class Reference:
    """A model as transformers runs it.

    Args:
        dtype: "fp32" or "bf16".
        token_ids: as of ``Workbench``.

    Raises:
        ModelUnsupported: the folder can't be loaded.
    """

    def __init__(self, folder: Path, dtype: str, token_ids: Sequence[int]) -> None:
        self._model = load_model(folder, dtype).model
        self._ids = torch.tensor(token_ids, dtype=torch.int64)

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """One step of ``batch`` sequences that have ``context`` tokens; greedy."""
        cache = DynamicCache(config=self._model.config)
        self._run(self._ids[None, :context], cache)
        cache.batch_repeat_interleave(batch)
        ids = self._ids[context].expand(batch, 1)

        def step() -> Tensor:
            chosen = self._run(ids, cache)
            cache.crop(-1)
            return chosen

        return step

    def prefill(self, prompt_len: int) -> Callable[[], object]:
        """A prompt from its beginning, logits of the last position only."""
        ids = self._ids[None, :prompt_len]
        return lambda: self._run(ids, DynamicCache(config=self._model.config))

    @torch.inference_mode()
    def teacher_forced(self, token_ids: Sequence[int]) -> Tensor:
        """The logits behind each of ``token_ids``: [n, vocab_size] float32."""
        logits: Tensor = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def _run(self, ids: Tensor, cache: DynamicCache) -> Tensor:
        output = self._model(ids, cache=cache, use_cache=True, logits_to_keep=1)
        chosen: Tensor = output.logits[:, -1].argmax(-1)
        return chosen
