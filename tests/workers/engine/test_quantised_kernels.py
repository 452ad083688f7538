"""Products of quantised weights, against numpy and gguf's own arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.engine.native.library import Kind, Linear, NativeError, NativeLibrary, check
from workers.engine.native.load import load_library

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
_TYPES = tuple(_BLOCK_BYTES)


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return load_library()


def random_blocks(
    rng: np.random.Generator, type_name: str, num_outputs: int, num_inputs: int
) -> Tensor:
    """Rows of blocks with any values, and scales and minima of either sign, 0 among them."""
    blocks = rng.integers(
        0, 256, (num_outputs, num_inputs // 32, _BLOCK_BYTES[type_name]), np.uint8
    )
    for place in range(2 if type_name == "Q4_1" else 1):
        halves = (rng.integers(-4, 5, blocks.shape[:2]) / 37).astype(np.float16)
        blocks[:, :, 2 * place : 2 * place + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(num_outputs, -1))


def floats_of(type_name: str, blocks: Tensor) -> npt.NDArray[np.float32]:
    floats: npt.NDArray[np.float32] = dequantize(blocks.numpy(), GGMLQuantizationType[type_name])
    return floats


def packed(
    library: NativeLibrary, type_name: str, blocks: Tensor, bias: Tensor | None, *, exact: bool
) -> Linear:
    num_inputs = blocks.shape[1] // _BLOCK_BYTES[type_name] * 32
    kind = Kind[f"EXACT_{type_name}" if exact else type_name]
    linear = Linear(library, kind, len(blocks), num_inputs)
    half = len(blocks) // 2  # as the parts of a fused layer come
    linear.fill(0, blocks[:half], None if bias is None else bias[:half], source=Kind[type_name])
    linear.fill(half, blocks[half:], None if bias is None else bias[half:], source=Kind[type_name])
    return linear


def rounded(inputs: Tensor) -> npt.NDArray[np.float64]:
    """What input rows are rounded to: whole steps of the largest of 32, over 32,767."""
    most = 32767
    groups = inputs.numpy().reshape(len(inputs), -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(most, largest, out=np.zeros_like(largest), where=largest > 1e-30)
    integers = np.rint(groups.astype(np.float64) * inverse)
    return (integers * (largest.astype(np.float64) / most)).reshape(inputs.shape)


shapes = st.fixed_dictionaries(
    {
        "type_name": st.sampled_from(_TYPES),
        "num_outputs": st.integers(1, 70),
        "num_groups": st.integers(1, 9),
        "num_rows": st.integers(1, 110),
        "num_threads": st.integers(1, 3),
        "has_bias": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)


class _Case:
    """Blocks, rows and a bias of one shape."""

    def __init__(self, shape: dict[str, int]) -> None:
        rng = np.random.default_rng(shape["seed"])
        self.type_name = str(shape["type_name"])
        num_outputs, num_inputs = shape["num_outputs"], 32 * shape["num_groups"]
        self.blocks = random_blocks(rng, self.type_name, num_outputs, num_inputs)
        rows = rng.standard_normal((shape["num_rows"], num_inputs), np.float32)
        rows[rng.random(rows.shape) < 0.1] *= 30  # outliers, as activations have them
        rows[0, :32] = 0
        self.rows = torch.from_numpy(rows)
        self.bias = torch.from_numpy(rng.standard_normal(num_outputs, np.float32))
        if not shape["has_bias"]:
            self.bias.zero_()


@settings(max_examples=60, deadline=None)
@given(shape=shapes)
def test_exact_products_are_those_of_floats(library: NativeLibrary, shape: dict[str, int]) -> None:
    """The exact kinds give the same bits as fp32 weights of the numbers that the blocks stand
    for; whatever the number of rows, outputs and threads."""
    case = _Case(shape)
    linear = packed(library, case.type_name, case.blocks, case.bias, exact=True)
    floats = torch.from_numpy(floats_of(case.type_name, case.blocks))
    reference = Linear(library, Kind.FP32, *floats.shape)
    reference.fill(0, floats, case.bias)
    got = linear.multiply(case.rows, shape["num_threads"])
    assert torch.equal(got, reference.multiply(case.rows))


@settings(max_examples=60, deadline=None)
@given(shape=shapes)
def test_integer_products_are_those_of_rounded_rows(
    library: NativeLibrary, shape: dict[str, int]
) -> None:
    """The fast kinds multiply by rows rounded in groups of 32, and round nothing else."""
    case = _Case(shape)
    linear = packed(library, case.type_name, case.blocks, case.bias, exact=False)
    weights = floats_of(case.type_name, case.blocks).astype(np.float64)
    rows = rounded(case.rows)
    expected = rows @ weights.T + case.bias.numpy()
    size = np.abs(rows) @ np.abs(weights.T) + np.abs(case.bias.numpy()) + 1e-30
    got = linear.multiply(case.rows, shape["num_threads"]).numpy()
    assert (np.abs(got - expected) / size).max() < 1e-5  # a tie may be rounded the other way


@settings(max_examples=30, deadline=None)
@given(shape=shapes, data=st.data())
def test_a_row_does_not_see_its_neighbours(
    library: NativeLibrary, shape: dict[str, int], data: st.DataObject
) -> None:
    """A row's results are the same bits alone and in any batch, with any number of threads."""
    case = _Case(shape)
    row = data.draw(st.integers(0, len(case.rows) - 1))
    for exact in (False, True):
        linear = packed(library, case.type_name, case.blocks, case.bias, exact=exact)
        together = linear.multiply(case.rows, shape["num_threads"])
        assert torch.equal(together[row], linear.multiply(case.rows[row : row + 1])[0])


@pytest.mark.parametrize("type_name", _TYPES)
def test_every_weight_comes_back(library: NativeLibrary, type_name: str) -> None:
    """What was packed is unpacked as gguf dequantises it, each number of each row."""
    blocks = random_blocks(np.random.default_rng(7), type_name, 53, 96)
    expected = torch.from_numpy(floats_of(type_name, blocks))
    for exact in (False, True):
        linear = packed(library, type_name, blocks, None, exact=exact)
        assert torch.equal(torch.stack([linear.row(output) for output in range(53)]), expected)


def test_what_cant_be_packed_is_refused(library: NativeLibrary) -> None:
    """Rows that are no whole blocks, and sources of another kind."""
    with pytest.raises(NativeError, match="multiple of 32"):
        Linear(library, Kind.Q4_1, 16, 48)
    with pytest.raises(NativeError, match="such a source"):
        Linear(library, Kind.Q4_1, 16, 64).fill(0, torch.zeros(16, 64))
    with pytest.raises(NativeError, match="only Q4_1 and Q8_0"):
        quantised(library, "Q4_0", np.zeros((1, 32), np.float32))


def quantised(library: NativeLibrary, type_name: str, weights: npt.NDArray[np.float32]) -> Tensor:
    num_groups = weights.size // 32
    rows = torch.zeros(len(weights), num_groups // len(weights) * _BLOCK_BYTES[type_name]).byte()
    source = np.ascontiguousarray(weights)
    check(
        library.functions.mesh_quantise(
            Kind[type_name], source.ctypes.data, num_groups, rows.data_ptr()
        )
    )
    return rows


def squared_error(type_name: str, blocks: Tensor, weights: npt.NDArray[np.float32]) -> float:
    return float(((floats_of(type_name, blocks) - weights) ** 2).sum())


def test_quantising_errs_less_than_rounding(library: NativeLibrary) -> None:
    """The searched 4-bit groups have at most 0.9 of the squared error of plain rounding between
    each group's least and greatest weight; 8-bit ones are as good as gguf's."""
    weights = np.random.default_rng(3).standard_normal((64, 256), np.float32) / 50
    ours = squared_error("Q4_1", quantised(library, "Q4_1", weights), weights)
    plain = torch.from_numpy(quantize(weights, GGMLQuantizationType.Q4_1))
    assert ours < 0.9 * squared_error("Q4_1", plain, weights)
    eight = squared_error("Q8_0", quantised(library, "Q8_0", weights), weights)
    theirs = torch.from_numpy(quantize(weights, GGMLQuantizationType.Q8_0))
    assert eight < 1.01 * squared_error("Q8_0", theirs, weights)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0"])
def test_quantising_odd_groups(library: NativeLibrary, type_name: str) -> None:
    """Groups of zeros and of one repeated number come back; one outlier keeps its size."""
    weights = np.zeros((3, 32), np.float32)
    weights[1] = -0.125
    weights[2, 5] = 3.0
    got = floats_of(type_name, quantised(library, type_name, weights))
    assert np.abs(got - weights).max() < 0.01
