"""When a step is recorded, when it is replayed, when that is given up.

CUDA's own calls are stood in for: what is "recorded" is the forward pass and its inputs' place,
and a replay runs it there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.engine.device.graphs import Graphs
from workers.engine.device.inputs import StepShape

CPU = torch.device("cpu")


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGraph:
    def __init__(self) -> None:
        self.again: Callable[[], None] = lambda: None

    def replay(self) -> None:
        self.again()


class Forward:
    """Doubles its numbers; the result's place is fixed while recording."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.recording: FakeGraph | None = None
        self.is_recordable = True

    def __call__(self, numbers: Tensor, shape: StepShape) -> Tensor:
        self.num_calls += 1
        out = numbers * 2
        if self.recording is not None:
            if not self.is_recordable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.recording.again = lambda: out.copy_(numbers * 2)
        return out


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    made = Forward()

    @contextmanager
    def graph(target: FakeGraph, pool: Any = None) -> Iterator[None]:
        made.recording = target
        try:
            yield
        finally:
            made.recording = None

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return made


def shape(size: int) -> StepShape:
    return StepShape(
        num_rows=size,
        num_sequences=size,
        width=1,
        num_logits=size,
        shares=(),
        max_q=1,
        max_k=4,
        num_keys=None,
    )


def test_a_shape_is_recorded_once_and_replayed(forward: Forward) -> None:
    """Every step, the first included, gives its own numbers' result; after two warm-ups and the
    recording the forward pass runs no more for that shape."""
    graphs = Graphs(forward, CPU)
    for value in range(5):
        assert graphs.run(torch.tensor([value, 7]), shape(2)).tolist() == [2 * value, 14]
    assert forward.num_calls == 3
    assert graphs.run(torch.tensor([1, 2, 3]), shape(3)).tolist() == [2, 4, 6]
    assert forward.num_calls == 6
    assert graphs.run(torch.tensor([9, 9]), shape(2)).tolist() == [18, 18]
    assert forward.num_calls == 6


def test_what_cant_be_recorded_runs_as_it_is(forward: Forward) -> None:
    """One attempt in all: a model that asks the device for a number does so in every shape."""
    graphs = Graphs(forward, CPU)
    forward.is_recordable = False
    assert graphs.run(torch.tensor([4]), shape(1)).tolist() == [8]
    assert forward.num_calls == 4
    assert graphs.run(torch.tensor([5]), shape(1)).tolist() == [10]
    assert graphs.run(torch.tensor([5, 6]), shape(2)).tolist() == [10, 12]
    assert forward.num_calls == 6
