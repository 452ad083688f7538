"""From a folder to a model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from infra.model_folder import ModelFolder, open_model_folder
from schemas.errors import ModelUnsupported
from workers.engine.dtypes import torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the facts of its folder."""

    model: PreTrainedModel
    facts: ModelFolder


def load_model(folder: Path | str, dtype: str = "auto") -> LoadedModel:
    """Load a model's weights, for inference on the CPU.

    Args:
        dtype: "fp32", "bf16", or "auto": what this processor multiplies faster. "q4" and
            "q4-exact" are loaded as bf16 and fp32, for the native path to put in blocks.

    Raises:
        ModelUnsupported: the folder is incomplete or broken, the architecture can't be served, or
            the weights do not fill it.
        ConfigError: an unknown dtype.
    """
    kept_in = torch_dtype(preferred_dtype() if dtype == "auto" else dtype)
    facts = open_model_folder(folder)
    _check_class(facts)
    try:
        model, loading = _read_weights(facts.path, kept_in)
    except Exception as error:  # transformers raises of any kind here; the reason is passed on
        raise ModelUnsupported(f"{facts.path}: can't be loaded: {error}", param="model") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelUnsupported(
            f"{facts.path}: {len(missing)} weights are missing, such as {missing[0]}",
            param="model",
        )
    return LoadedModel(model=model, facts=facts)


def preferred_dtype() -> str:
    """ "bf16" where the processor has instructions for it, else "fp32".

    Without them bf16 is emulated: on an AVX2 machine a prefill of 512 tokens of the default model
    took 9.3 s in bf16 and 1.0 s in fp32.
    """
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def _read_weights(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and what transformers says about how its weights matched."""
    quiet: Any = transformers_logging  # untyped
    quiet.disable_progress_bar()  # progress is told by our own lines
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, loading = loaded
    return model.eval(), loading


def _check_class(facts: ModelFolder) -> None:
    """Refuse what transformers knows no decoder for; code that comes with a model is not run."""
    where = facts.path / "config.json"
    try:
        config = AutoConfig.from_pretrained(facts.path, local_files_only=True)
    except Exception as error:  # of any kind, see above
        raise ModelUnsupported(f"{where}: {error}", param="model") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(
            f"{where}: architecture {facts.architecture!r} can't be served: "
            "transformers has no causal decoder for it",
            param="model",
        )
