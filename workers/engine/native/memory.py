"""What is remembered of a model that ran natively, so that it starts again without transformers.

Importing transformers and loading a model with it takes a worker longer than all else: most of it
only to know what right answers are, and how the model is made. Both are kept in the user's cache:
the blueprint, and the logits of the self-test as the general path gave them. A start that finds
them packs the weight files and asks the native path for the same logits, as the first did.

They hold for one model revision, form of weights and version of all that has a part in them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infra.model_folder import ModelFolder
from workers.engine.native.blueprint import Blueprint
from workers.engine.sources import default_cache_dir

_NATIVE = Path(__file__).parent
_OURS = (*sorted(_NATIVE.glob("*.py")), *sorted(_NATIVE.parent.glob("*.py")))  # of both paths

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is remembered."""

    blueprint: Blueprint
    expected: Tensor  # [n, vocab_size] float32: ``probe_logits`` of the general path


class Memory:
    """Of one model in one form.

    Args:
        form: its dtype, or that of its blocks.
    """

    def __init__(self, facts: ModelFolder, form: str) -> None:
        self._folder = default_cache_dir().parent / "checked"
        self._stem = f"native-{facts.revision}-{form}"
        self._file = self._folder / f"{self._stem}.{_versions()}.safetensors"

    def recall(self) -> Known | None:
        """What was written; None: nothing, or nothing that can be read."""
        try:
            with safe_open(self._file, framework="pt") as content:
                blueprint = msgspec.json.decode(content.metadata()["blueprint"], type=Blueprint)
                return Known(blueprint=blueprint, expected=content.get_tensor("expected"))
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, TypeError, msgspec.MsgspecError) as error:
            _log.warning("native_memory_broken", file=str(self._file), reason=str(error))
            return None

    def write(self, known: Known) -> None:
        """Keep it, in place of what other versions wrote; a cache that can't be written is said
        in the log, and the next start does all of it again."""
        metadata = {"blueprint": msgspec.json.encode(known.blueprint).decode()}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".part-", dir=self._folder) as work:
                part = Path(work) / "known"
                save_file({"expected": known.expected.contiguous()}, part, metadata)
                for stale in self._folder.glob(f"{self._stem}.*"):
                    stale.unlink(missing_ok=True)
                os.rename(part, self._file)
        except (OSError, SafetensorError) as error:
            _log.info("native_memory_not_kept", reason=str(error))

    def forget(self) -> None:
        """It was wrong."""
        self._file.unlink(missing_ok=True)


def holds_all(shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, Tensor]) -> bool:
    """Whether weight files hold all of a model's parameters under its own names: some are
    rearranged when transformers loads them."""
    return all(shapes.get(name) == tuple(one.shape) for name, one in parameters.items())


def _versions() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (torch.__version__, version("transformers")):
        digest.update(f"{part}\0".encode())
    for file in _OURS:
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
