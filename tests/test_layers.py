"""Which package may import which.

    schemas <- infra <- pipeline <- workers <- loadgen

An arrow is "may be imported by". Torch and what brings it stay inside ``workers/``. The command
line (``infra/cli.py``, ``infra/commands/``) may import everything, but only inside functions, so
that starting it imports next to nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("schemas", "infra", "pipeline", "workers", "loadgen")
NO_IMPORTER = "loadgen"
TORCH = {"torch", "transformers", "peft", "accelerate", "safetensors"}
FILES = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]


def imports(tree: ast.AST, *, is_typing: bool = False) -> Iterator[str]:
    """Modules imported anywhere in ``tree``, except for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module or ""
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imports(node)


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Modules imported when the file is."""

    class Top(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

    yield from imports(Top().visit(tree))


def is_command_line(file: Path) -> bool:
    relative = file.relative_to(ROOT / "infra")
    return relative.parts[0] in ("cli.py", "commands")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_go_leftwards_only(file: Path) -> None:
    """A file imports its own layer and those left of it; torch only in workers."""
    layer = file.relative_to(ROOT).parts[0]
    tree = ast.parse(file.read_text())
    lazy = layer == "infra" and is_command_line(file)
    found = {name.partition(".")[0] for name in (top_level_imports if lazy else imports)(tree)}
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    assert found & set(LAYERS) <= set(allowed)
    if layer != "workers":
        assert not found & TORCH


def test_the_table_of_layers_is_complete() -> None:
    """A new top-level package has to find its place in it."""
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert packages == set(LAYERS)


@pytest.mark.parametrize("layer", ["schemas", "infra", "pipeline"])
def test_nothing_left_of_workers_pulls_in_torch(layer: str) -> None:
    """Also not through some library: everything of the layer is imported, torch is not."""
    modules = sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in (ROOT / layer).rglob("*.py")
    )
    code = (
        f"import importlib, sys\n[importlib.import_module(name) for name in {modules!r}]\n"
        f"print(sorted(name for name in {sorted(TORCH)!r} if name in sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "[]\n"
