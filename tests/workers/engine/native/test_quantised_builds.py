"""Builds of the quantised products: under sanitizers, with sixteen lanes, for AVX-512."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from workers.engine.native.compiler import SOURCES, compile_files, target_options

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
STRICT = (
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-psabi",
    "-std=c++20",
    "-ffp-contract=off",
    "-pthread",
)
SANITIZED = (
    "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)  # fmt: skip
OTHERS = ("quantise.cpp", "thread_team.cpp")
DRIVER = Path(__file__).with_name("quantised_driver.cpp")


def output_of(folder: Path, *options: str) -> str:
    """What the driver prints when it is built so."""
    program = folder / "driver"
    folder.mkdir()
    files = [*SOURCES.glob("linear*.cpp"), *(SOURCES / name for name in OTHERS), DRIVER]
    compile_files(files, (*STRICT, *target_options(AVX2), f"-I{SOURCES}", *options), program)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1"}
    done = subprocess.run(
        [program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sanitizers_find_nothing_and_widths_agree(tmp_path: Path) -> None:
    """Every kind of blocks, both ways to multiply, full and partly full panels, with one to three
    threads: no sanitizer complains, and a machine with vectors of sixteen lanes (here out of
    pairs) computes the same bits as one with eight."""
    narrow = output_of(tmp_path / "narrow", *SANITIZED)
    wide = output_of(tmp_path / "wide", "-O1", "-DMESH_VECTOR_WIDTH=16")
    assert len(narrow.splitlines()) == 3 * 2 * 6 * 4 + 2
    assert narrow == wide


@pytest.mark.slow
def test_pairs_are_one_instruction_where_there_is_one(tmp_path: Path) -> None:
    """With VNNI pairs are multiplied and added to a sum at once; both ways are exact."""
    options = (*STRICT, *target_options(AVX512), "-O1", "-fPIC")
    files = [SOURCES / "linear_q4.cpp"]
    compile_files(files, options, tmp_path / "q4.so", linking=("-shared",))
    code = subprocess.run(
        ["objdump", "-d", tmp_path / "q4.so"],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert "vpdpwssd" in code
    assert "vpmaddwd" not in code
