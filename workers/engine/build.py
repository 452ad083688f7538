"""From a model folder to an engine: native where that is possible, else the general path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog
import torch

from infra.model_folder import ModelFolder
from infra.transport.shm import SharedPool
from schemas.errors import ConfigError
from workers.engine.api import Runner
from workers.engine.device.select import CPU, resolve_device
from workers.engine.dtypes import QUANTISED
from workers.engine.engine import Engine, EngineConfig
from workers.engine.kv_layout import KvLayout
from workers.engine.native.compiler import NativeUnavailable
from workers.engine.native.load import load_native
from workers.engine.output import Vocabulary

if TYPE_CHECKING:
    from workers.engine.loader import LoadedModel

_log = structlog.get_logger(__name__)


def build_torch_engine(
    folder: Path | str,
    *,
    dtype: str = "auto",
    kernels: str = "auto",
    device: str = "cpu",
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    host_bytes: int = 0,
    block_size: int = 16,
    num_threads: int | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """Load a model and put an engine around it. Takes seconds.

    Args:
        dtype: of weights and KV cache, see :func:`workers.engine.loader.load_model`; "auto" is
            bf16 on the native path and on CUDA, else what this processor multiplies faster. "q4"
            (a KV cache in bf16) and "q4-exact" (in fp32) exist on the native path alone.
        kernels: "native", "general" (transformers' modules), or "auto": native where possible.
        device: "cpu", "cuda", "cuda:N", or "auto": CUDA where there is one, unless dtype or kernels
            exist on the CPU alone. On CUDA transformers' modules compute, and the shared pool
            holds copies of the blocks that are exchanged.
        num_blocks, kv_bytes: the size of the KV pool; one of them. Memory is taken as blocks are
            written, not at once. From ``kv_bytes`` no more blocks are made than all sequences of
            full length could fill.
        host_bytes: what the shared pool has beyond that, for a host tier; whole blocks of it.
        num_threads: what torch and the native library may use; None leaves torch's number as it
            is and takes the same.

    Raises:
        ModelUnsupported: the model can't be served.
        ConfigError: the pool has room for less than one block, an unknown dtype, or a device or
            native kernels were asked for, or are needed by ``dtype``, and can't be had.
    """
    if (num_blocks is None) == (kv_bytes is None):
        raise ConfigError("give either num_blocks or kv_bytes", param="kv_memory")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    builder = _Builder(
        Path(folder), dtype, block_size, num_blocks, kv_bytes, host_bytes, config or EngineConfig()
    )
    where = _device(device, dtype, kernels)
    if where != CPU:
        return builder.on_device(where)
    reason = "kernels is general"
    if kernels != "general":
        try:
            return builder.native()
        except NativeUnavailable as error:
            reason = str(error)
    if dtype in QUANTISED:
        raise ConfigError(f"dtype {dtype} needs native kernels: {reason}", param="dtype")
    if kernels == "native":
        raise ConfigError(f"native kernels can't be used: {reason}", param="kernels")
    _log.info("general_path_chosen", reason=reason)
    return builder.general()


def _device(name: str, dtype: str, kernels: str) -> torch.device:
    """What exists on the CPU alone decides for it where the device is left open."""
    on_cpu_alone = dtype in QUANTISED or kernels == "native"
    device = resolve_device("cpu" if name == "auto" and on_cpu_alone else name)
    if device != CPU and on_cpu_alone:
        what = f"dtype {dtype}" if dtype in QUANTISED else "native kernels"
        raise ConfigError(f"{what} can't be had on {device}", param="device")
    return device


class _Builder:
    """Builds one engine in one of the ways. transformers is imported where it is needed: that takes
    seconds, and a model that ran natively before does without."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        block_size: int,
        num_blocks: int | None,
        kv_bytes: int | None,
        host_bytes: int,
        config: EngineConfig,
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._kv_bytes = kv_bytes
        self._host_bytes = host_bytes
        self._config = config

    def native(self) -> Engine:
        dtype = "bf16" if self._dtype == "auto" else self._dtype
        loaded = load_native(
            self._folder,
            dtype,
            block_size=self._block_size,
            num_threads=torch.get_num_threads(),
        )
        pool, slots = self._pool(loaded.facts, loaded.layout)
        return self._engine(loaded.runner(slots), pool, loaded.facts)

    def general(self) -> Engine:
        from workers.engine.runner import TorchRunner  # transformers, and seconds of imports

        loaded, layout = self._loaded(self._dtype)
        pool, slots = self._pool(loaded.facts, layout)
        return self._engine(TorchRunner(loaded, layout, slots), pool, loaded.facts)

    def on_device(self, device: torch.device) -> Engine:
        from workers.engine.device.load import load_on_device  # transformers

        loaded, layout = self._loaded("bf16" if self._dtype == "auto" else self._dtype)
        pool, slots = self._pool(loaded.facts, layout)
        most = self._config.max_num_sequences
        runner = load_on_device(loaded, layout, slots, device, max_batch=most)
        return self._engine(runner, pool, loaded.facts)

    def _loaded(self, dtype: str) -> tuple[LoadedModel, KvLayout]:
        from workers.engine.loader import load_model
        from workers.engine.runner import layout_of

        loaded = load_model(self._folder, dtype)
        return loaded, layout_of(loaded, block_size=self._block_size)

    def _engine(self, runner: Runner, pool: SharedPool, facts: ModelFolder) -> Engine:
        return Engine(runner, pool, Vocabulary.from_folder(facts.path), self._config)

    def _pool(
        self, facts: ModelFolder, layout: KvLayout
    ) -> tuple[SharedPool, npt.NDArray[np.uint8]]:
        """The memory, and its slots that are the engine's."""
        num_blocks = self._num_blocks
        if self._kv_bytes is not None:
            blocks_per_sequence = -(-facts.context_length // self._block_size)
            most = blocks_per_sequence * self._config.max_num_sequences
            num_blocks = min(most, _num_blocks(self._kv_bytes, layout))
        assert num_blocks is not None
        num_host_blocks = self._host_bytes // layout.block_bytes
        pool = SharedPool(num_blocks + num_host_blocks, layout.block_bytes)
        return pool, pool.slots[:num_blocks]


def _num_blocks(kv_bytes: int, layout: KvLayout) -> int:
    num_blocks = kv_bytes // layout.block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"{kv_bytes} bytes hold no block of {layout.block_bytes}", param="kv_memory"
        )
    return num_blocks
