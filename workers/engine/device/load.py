"""From a model in memory to a runner on a device, with the best attention that passes its check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog
import torch

from schemas.errors import ModelUnsupported
from workers.engine.device.backends import Backend, make_backend
from workers.engine.device.check import agrees, max_difference
from workers.engine.device.choice import Candidate, Needs, candidates
from workers.engine.device.needs import find_machine, find_needs
from workers.engine.device.runner import DeviceRunner
from workers.engine.device.select import current
from workers.engine.kv_layout import KvLayout
from workers.engine.loader import LoadedModel

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The ways that are used: for steps of decodes alone, and for all others."""

    decode: Backend
    mixed: Backend


def load_on_device(
    loaded: LoadedModel,
    layout: KvLayout,
    shared: npt.NDArray[np.uint8],
    device: torch.device,
    *,
    max_batch: int,
) -> DeviceRunner:
    """Move the model to ``device``, choose its attention, and make its pool there.

    Args:
        layout: of this model, by :func:`workers.engine.runner.layout_of`.
        shared: the pool that other processes read.

    Raises:
        ModelUnsupported: model or pool do not fit the device, or no attention passes its check.
    """
    try:
        torch.nn.Module.to(loaded.model, device)
        with current(device):
            needs = find_needs(loaded.model)
            chosen = choose(candidates(find_machine(device), needs), layout, needs, device)
        return DeviceRunner(
            loaded,
            layout,
            shared,
            decode=chosen.decode,
            mixed=chosen.mixed,
            max_batch=max_batch,
        )
    except torch.OutOfMemoryError as error:
        raise ModelUnsupported(
            f"model and KV cache ({shared.nbytes / 1e9:.3g} GB) do not fit {device}: {error}",
            param="kv_memory",
        ) from error


def choose(
    ways: tuple[Candidate, ...], layout: KvLayout, needs: Needs, device: torch.device
) -> Chosen:
    """Try them in order; one log line says what was chosen and why not what comes before.

    Raises:
        ModelUnsupported: none passes.
    """
    refused = {way.name: way.refusal for way in ways if way.refusal}
    decode: Backend | None = None
    for way in ways:
        if way.refusal:
            continue
        backend = _checked(way.name, layout, needs, device, refused)
        if backend is None:
            continue
        decode = decode or backend
        if not backend.decodes_only:
            _log.info("attention_chosen", decode=decode.name, mixed=backend.name, refused=refused)
            return Chosen(decode=decode, mixed=backend)
    raise ModelUnsupported(f"no attention works on {device}: {refused}", param="device")


def _checked(
    name: str,
    layout: KvLayout,
    needs: Needs,
    device: torch.device,
    refused: dict[str, str],
) -> Backend | None:
    """The way of that name if it is right; else None, and ``refused`` says why."""
    try:
        backend = make_backend(name)
        difference = max_difference(backend, layout, needs, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # other people's kernels; whatever they raise, another way is there
        refused[name] = f"{type(error).__name__}: {error}"
        _log.warning("attention_dropped", name=name, reason=refused[name])
        return None
    if agrees(difference, layout.dtype):
        return backend
    refused[name] = f"differs from plain attention by {difference:.3g}"
    _log.warning("attention_dropped", name=name, reason=refused[name])
    return None
