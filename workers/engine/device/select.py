"""Which device a worker computes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from schemas.errors import ConfigError

CPU = torch.device("cpu")


def resolve_device(name: str) -> torch.device:
    """The device behind a worker's setting: "cpu", "cuda", "cuda:N", or "auto": CUDA where there
    is one.

    Raises:
        ConfigError: CUDA is asked for, and this torch or this machine has none, or fewer devices.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        reason = "no GPU is seen" if torch.version.cuda else "this torch is built without CUDA"
        raise ConfigError(f"device {name} can't be used: {reason}", param="device")
    device = torch.device("cuda" if name == "auto" else name)
    number, count = device.index or 0, torch.cuda.device_count()
    if number >= count:
        raise ConfigError(f"device {name} can't be used: CUDA sees {count}", param="device")
    return torch.device("cuda", number)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within it, ``device`` is this thread's current one: that is where kernels of others than
    torch are launched. New threads begin with device 0."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def device_name(device: torch.device) -> str:
    """What it is called before people, "NVIDIA H200"; "" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
