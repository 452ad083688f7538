"""infra/setup, infra/up, infra/test and what they install."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "infra" / "setup"
STAMP = ROOT / ".venv" / ".mesh-setup"


def pins() -> dict[str, str]:
    lines = (ROOT / "infra" / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    return [Requirement(text) for text in [*project["dependencies"], *extras]]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_dependency_is_pinned_to_a_version_it_allows(requirement: Requirement) -> None:
    """infra/constraints.txt and pyproject.toml can't drift apart."""
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


def test_pins_hold_anywhere() -> None:
    """Exact versions, no local tags, no files, no hosts: any index can serve them."""
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), f"{name}=={version}"


@pytest.mark.parametrize("name", ["setup", "up", "test", "clients_check"])
def test_a_script_is_executable_and_correct_shell(name: str) -> None:
    """bash reads it without complaint."""
    script = ROOT / "infra" / name
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_setup_does_nothing_when_all_is_there() -> None:
    """Under two seconds, and silent."""
    if not STAMP.exists():
        pytest.skip("this environment was not made by infra/setup")
    started_s = time.monotonic()
    ended = subprocess.run([str(SETUP)], capture_output=True, text=True, timeout=600, check=True)
    took_s = time.monotonic() - started_s
    if ended.stderr:
        pytest.skip("pyproject.toml or constraints changed: infra/setup had to install")
    assert took_s < 2


@pytest.fixture
def bare_setup(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``infra/setup`` of a new tree, on a path with nothing but an old Python."""
    tree, tools = tmp_path / "tree", tmp_path / "bin"
    (tree / "infra").mkdir(parents=True)
    tools.mkdir()
    for file in ("infra/setup", "infra/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tree / file)
    for tool in ("bash", "env", "dirname", "cat", "sha256sum", "uname"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [str(tree / "infra" / "setup")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": str(tools), **environment},
        )
        assert ended.returncode == 1
        assert not (tree / ".venv").exists()
        return ended

    return run


def test_setup_without_a_suitable_python_says_what_is_missing(
    bare_setup: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Which versions, which modules, which variable."""
    said = bare_setup().stderr
    assert "no Python 3.11 to 3.13" in said
    assert "MESH_PYTHON" in said


def test_setup_takes_no_other_python_than_the_one_that_was_named(
    bare_setup: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """One that it can't take is an error that names it."""
    named = str(tmp_path / "python9")
    said = bare_setup(MESH_PYTHON=named).stderr
    assert f"MESH_PYTHON: {named} is no Python 3.11 to 3.13" in said
