"""Remembering which models passed the check of our attention, so that it is made once.

A verdict holds for one model revision, KV layout, processor and version of everything that has a
part in it: torch, transformers and our own source files.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import structlog
import torch
import transformers
from transformers import PreTrainedModel

from workers.engine.attention import IMPLEMENTATION
from workers.engine.kv_layout import KvLayout
from workers.engine.probe import check_attention
from workers.engine.sources import default_cache_dir

_OURS = ("attention.py", "forward.py", "kv_layout.py", "kv_pool.py", "paged_step.py", "probe.py")

_log = structlog.get_logger(__name__)


def check_attention_once(model: PreTrainedModel, layout: KvLayout) -> None:
    """:func:`check_attention`, unless this user's cache says that it was passed before.

    Either way the model's attention is ours afterwards.

    Raises:
        ModelUnsupported: as :func:`check_attention`; that is never remembered.
    """
    verdict = default_cache_dir().parent / "checked" / _name(layout)
    if verdict.exists():
        model.set_attn_implementation(IMPLEMENTATION)
        return
    check_attention(model, layout)
    try:
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.touch()
    except OSError as error:
        _log.info("verdict_not_kept", reason=str(error))  # the next start checks again


def _name(layout: KvLayout) -> str:
    digest = hashlib.blake2b(digest_size=16)
    versions = (torch.__version__, transformers.__version__, platform.processor())
    for part in (layout.fingerprint, torch.backends.cpu.get_cpu_capability(), *versions):
        digest.update(f"{part}\0".encode())
    for name in _OURS:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()
