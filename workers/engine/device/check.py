"""Each way to compute attention against plain attention, with random numbers, at load.

The model's heads, dtype and kinds of scoring; a few short sequences whose blocks lie in disorder,
as decodes and as chunks. What differs by more than rounding, or raises, is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from schemas.requests import SamplingParams
from workers.engine.api import ScheduledSequence
from workers.engine.attention import Scoring, attend
from workers.engine.device.backends import Backend
from workers.engine.device.choice import Needs
from workers.engine.device.inputs import StepInputs, pack_step
from workers.engine.device.step import DeviceStep
from workers.engine.kv_layout import KvLayout
from workers.engine.kv_pool import KvPool
from workers.engine.sequence import num_blocks_for

_LENGTHS = (1, 16, 37, 70, 300)
_COUNTS = (1, 1, 5, 1, 200)  # in a step with chunks; the others are decodes alone
_GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
_WINDOW = 9
_LAYER = 1
_TOLERANCE = {"float32": 2e-3}  # a multiplication in TF32 gives 5e-4
_HALF_TOLERANCE = 0.03  # of values near 1; rounding gives 0.004, a wrong mask about 1


def max_difference(backend: Backend, layout: KvLayout, needs: Needs, device: torch.device) -> float:
    """The largest error, relative to values of spread 1, over all that the model may ask."""
    generator = torch.Generator().manual_seed(0)
    probe = _Probe(replace(layout, num_layers=_LAYER + 1), needs, device, generator)
    steps = [(1,) * len(_LENGTHS)] if backend.decodes_only else [(1,) * len(_LENGTHS), _COUNTS]
    return max(
        probe.difference(backend, counts, scoring)
        for counts in steps
        for scoring in _scorings(needs, device, generator)
    )


def agrees(difference: float, dtype: str) -> bool:
    """Whether that is rounding. NaN is not."""
    return difference <= _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def _scorings(needs: Needs, device: torch.device, generator: torch.Generator) -> Iterator[Scoring]:
    sinks = torch.randn(needs.num_heads, generator=generator).to(device)
    for window in (None, _WINDOW) if needs.has_window else (None,):
        yield Scoring(
            scale=needs.head_dim**-0.5,
            window=window,
            softcap=2.0 if needs.has_softcap else None,
            sinks=sinks if needs.has_sinks else None,
        )


class _Probe:
    """Sequences with random keys and values in a pool of their own."""

    def __init__(
        self, layout: KvLayout, needs: Needs, device: torch.device, generator: torch.Generator
    ) -> None:
        self._layout = layout
        self._device = device
        dtype = getattr(torch, layout.dtype)
        heads, dim, total = layout.num_kv_heads, layout.head_dim, sum(_LENGTHS)
        made = torch.randn(2 * heads + needs.num_heads, total, dim, generator=generator)
        self._keys, self._values, self._queries = torch.split(
            made.to(device, dtype), [heads, heads, needs.num_heads]
        )
        widths = [num_blocks_for(length, layout.block_size) for length in _LENGTHS]
        order = torch.randperm(sum(widths), generator=generator)
        self._tables = [part.tolist() for part in torch.split(order, widths)]
        slots = torch.zeros(sum(widths), layout.block_bytes, dtype=torch.uint8, device=device)
        self._pool = KvPool(slots, layout)

    @torch.inference_mode()
    def difference(self, backend: Backend, counts: tuple[int, ...], scoring: Scoring) -> float:
        """Write all keys, then attend with each sequence's last tokens."""
        self._step(_LENGTHS, backend)
        step, query, keys, values = self._step(counts, backend)
        got = step.attend(query, keys, values, scoring)[0].float()
        rows = iter(torch.split(got, sorted(counts)))
        order = sorted(range(len(counts)), key=lambda number: counts[number] > 1)
        errors = [
            (next(rows) - self._plain(number, counts[number], scoring)).abs().max()
            for number in order
        ]
        return float(torch.stack(errors).max())

    def _step(
        self, counts: tuple[int, ...], backend: Backend
    ) -> tuple[DeviceStep, Tensor, Tensor, Tensor]:
        """A step with the last ``counts`` tokens of each sequence, written."""
        shape, numbers = pack_step(
            [self._sequence(number, count) for number, count in enumerate(counts)],
            self._layout.block_size,
        )
        inputs = StepInputs.of(torch.from_numpy(numbers).to(self._device), shape)
        rows = inputs.token_ids  # a token's id is its place among all sequences' tokens
        query, keys, values = (
            made[:, rows][None] for made in (self._queries, self._keys, self._values)
        )
        step = DeviceStep(self._pool, shape, inputs, backend)
        step.update(keys, values, _LAYER)
        return step, query, keys, values

    def _sequence(self, number: int, count: int) -> ScheduledSequence:
        first, length = sum(_LENGTHS[:number]), _LENGTHS[number]
        return ScheduledSequence(
            token_ids=range(first, first + length),
            num_prompt_tokens=length,
            block_table=self._tables[number],
            start=length - count,
            count=count,
            sample=True,
            sampling=_GREEDY,
            index=0,
        )

    def _plain(self, number: int, count: int, scoring: Scoring) -> Tensor:
        """[count, num_heads, head_dim] float32."""
        first, length = sum(_LENGTHS[:number]), _LENGTHS[number]
        here = slice(first, first + length)
        keys, values = self._keys[None, :, here].float(), self._values[None, :, here].float()
        queries = self._queries[:, first + length - count : first + length].float()
        num_heads, _, dim = queries.shape
        positions = torch.arange(length - count, length, device=self._device)[:, None]
        places = torch.arange(length, device=self._device)
        visible = places <= positions
        if scoring.window is not None:
            visible &= places > positions - scoring.window
        mask = torch.zeros(visible.shape, device=self._device).masked_fill_(~visible, -torch.inf)
        grouped = queries.view(1, keys.shape[1], -1, count, dim)
        out = attend(grouped, keys, values, mask, scoring)
        return out.view(num_heads, count, dim).transpose(0, 1)
