"""The models of ``mesh up`` become folders before anything is started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from infra.children import ChildFailed, describe_exit, die_with, inherited_environment
from infra.config import UpConfig
from infra.parse import ModelSource


async def prepare_models(
    command: tuple[str, ...], config: UpConfig, progress: Callable[[str], None]
) -> tuple[ModelSource, ...]:
    """Each model with its folder as the source, and native kernels where workers will want them;
    ``<command> prepare`` in a child does the work.

    Raises:
        ChildFailed: in the child's own words.
    """
    wants_native = config.worker.engine == "torch" and config.worker.kernels != "general"
    flags = ["--native-kernels"] if wants_native else []
    prepared = []
    for model in config.models:
        cache = f"--model-cache={config.bus.model_cache}"
        child = await asyncio.create_subprocess_exec(
            *command,
            "prepare",
            cache,
            *flags,
            "--",
            model.source,
            env=inherited_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGKILL),
        )
        try:
            folder, words = await _listen(child, progress)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode != 0:
            raise ChildFailed(f"{model}: {words or describe_exit(child.returncode or 0)}")
        prepared.append(ModelSource(model.name, folder))
    return tuple(prepared)


async def _listen(
    child: asyncio.subprocess.Process, progress: Callable[[str], None]
) -> tuple[str, str]:
    """Last line of stdout, last line of stderr."""
    assert child.stdout is not None, "a pipe"
    assert child.stderr is not None, "a pipe"
    words = ""
    async for line in child.stderr:
        words = line.decode(errors="replace").rstrip()
        progress(words)
    out = (await child.stdout.read()).decode().strip()
    await child.wait()
    return out.rpartition("\n")[2], words
