"""Which ways to compute attention a device and a model allow: pure, one row per way.

In the order in which they are preferred::

    fa3       FlashAttention 3 reads the paged pool; Hopper alone
    triton    our kernel reads the paged pool; steps of decodes only
    varlen    keys and values gathered into one row, torch's FlashAttention 2
    gather    keys and values gathered and padded, plain torch: anywhere, anything

What is allowed is checked with numbers when a model is loaded, see ``check``.
"""

from __future__ import annotations

from dataclasses import dataclass

_HALF = ("bfloat16", "float16")
_MAX_HEAD_DIM = 256  # of the flash kernels; ours keeps a row of it in registers
_HOPPER = (9, 0)
_AMPERE = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is there to compute with."""

    device: str  # "cuda" or "cpu"
    capability: tuple[int, int] = (0, 0)
    has_fa3: bool = False  # flash_attn_interface can be imported
    has_triton: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model asks of attention."""

    dtype: str  # of keys and values, torch's name
    num_heads: int
    head_dim: int
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way, and why it can't be gone; "" when it may be tried."""

    name: str
    refusal: str = ""


def candidates(machine: Machine, needs: Needs) -> tuple[Candidate, ...]:
    """All ways, the preferred first."""
    return (
        Candidate(name="fa3", refusal=_against_fa3(machine, needs)),
        Candidate(name="triton", refusal=_against_triton(machine, needs)),
        Candidate(name="varlen", refusal=_against_flash(machine, needs)),
        Candidate(name="gather"),
    )


def _against_fa3(machine: Machine, needs: Needs) -> str:
    refusal = _against_flash(machine, needs)
    if refusal:
        return refusal
    if machine.capability != _HOPPER:
        return f"made for compute capability 9.0, this is {_dotted(machine.capability)}"
    return "" if machine.has_fa3 else "flash_attn_interface is not installed"


def _against_triton(machine: Machine, needs: Needs) -> str:
    if machine.device != "cuda":
        return "needs CUDA"
    if machine.capability < _AMPERE:
        return f"needs compute capability 8.0, this is {_dotted(machine.capability)}"
    if needs.head_dim > _MAX_HEAD_DIM:
        return f"heads of {needs.head_dim} are too long"
    return "" if machine.has_triton else "triton is not installed"


def _against_flash(machine: Machine, needs: Needs) -> str:
    if machine.device != "cuda":
        return "needs CUDA"
    if machine.capability < _AMPERE:
        return f"needs compute capability 8.0, this is {_dotted(machine.capability)}"
    if needs.dtype not in _HALF:
        return f"{needs.dtype} is not a half precision"
    if needs.head_dim > _MAX_HEAD_DIM or needs.head_dim % 8:
        return f"heads of {needs.head_dim} don't fit"
    if needs.has_softcap:
        return "has no soft cap"
    return "has no sinks" if needs.has_sinks else ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(str(part) for part in capability)
