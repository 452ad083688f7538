"""A model's tensors by transformers' names, each to be taken once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from infra.model_folder import weight_files


class Tensors(Protocol):
    """Where packing takes tensors from."""

    def take(self, name: str) -> Tensor | None:
        """The tensor of a name, kept nowhere else from now on; None when there is none."""

    def drop(self, name: str) -> None:
        """Let go of a tensor, if there is one of that name."""


class ModelTensors:
    """Those of a loaded model, which is of no use afterwards: what is taken is freed in it, so that
    at no time there are two copies of all weights. Of tied ones the first name counts."""

    def __init__(self, model: Any) -> None:
        self._parameters = dict(model.named_parameters())

    def take(self, name: str) -> Tensor | None:
        """See :class:`Tensors`."""
        parameter = self._parameters.pop(name, None)
        if parameter is None:
            return None
        taken: Tensor = parameter.data
        parameter.data = torch.empty(0)
        return taken

    def drop(self, name: str) -> None:
        """See :class:`Tensors`."""
        self.take(name)


class FileTensors:
    """Those of a model's folder, read when they are taken.

    Args:
        dtype: what they are converted to.

    Raises:
        OSError, SafetensorError: a file can't be read.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            file: Any = safe_open(path, framework="pt")
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all of them."""
        return {
            name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()
        }

    def take(self, name: str) -> Tensor | None:
        """See :class:`Tensors`."""
        file = self._file_of.pop(name, None)
        if file is None:
            return None
        tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._dtype)

    def drop(self, name: str) -> None:
        """See :class:`Tensors`."""
        self._file_of.pop(name, None)
