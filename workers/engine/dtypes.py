"""What weights may be kept in."""

from __future__ import annotations

import torch

from schemas.errors import ConfigError

# Of weights in blocks, what they are compared with and what keys and values are kept in.
_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "q4": torch.bfloat16,
    "q4-exact": torch.float32,
}
QUANTISED = ("q4", "q4-exact")


def torch_dtype(name: str) -> torch.dtype:
    """What a setting means to torch.

    Raises:
        ConfigError: no such dtype. "auto" is none: who loads a model decides what that is.
    """
    found = _DTYPES.get(name)
    if found is None:
        known = ", ".join(("auto", *_DTYPES))
        raise ConfigError(f"dtype is {name!r}, none of {known}", param="dtype")
    return found
