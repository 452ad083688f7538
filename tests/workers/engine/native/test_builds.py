"""Other builds of the same sources: under sanitizers, sixteen lanes wide, for AVX-512."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.workers.engine.native.native_models import (
    VOCAB_SIZE,
    Shape,
    general_runner,
    layout_for,
    loaded,
    make_model,
    make_pool,
    packed_model,
    scheduled,
)
from tests.workers.engine.torch_engines import prompts
from workers.engine.native.compiler import SOURCES, compile_files, target_options
from workers.engine.native.library import NativeLibrary
from workers.engine.native.runner import NativeRunner
from workers.engine.native.self_test import divergence

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512_BF16 = AVX2 | {
    "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni",
}  # fmt: skip
STRICT = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-std=c++20", "-ffp-contract=off")
DRIVER = Path(__file__).with_name("sanitized_driver.cpp")
BLOCKS_DRIVER = Path(__file__).with_name("quantised_driver.cpp")
TEAM_DRIVER = Path(__file__).with_name("team_driver.cpp")
SANITIZED = (
    *STRICT, *target_options(AVX2), "-O0", "-g1", "-fPIC", "-pthread", f"-I{SOURCES}",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer",
)  # fmt: skip
# An AVX-512 machine's program, its vectors out of pairs, its instruction for bf16 pairs emulated.
WIDE = (
    *STRICT, *target_options(AVX2), "-O1", "-fPIC", "-pthread", f"-I{SOURCES}",
    "-DMESH_VECTOR_WIDTH=16", "-DMESH_BF16_DOT=1",
)  # fmt: skip
ALL = sorted(SOURCES.glob("*.cpp"))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Objects of all sources, under the address and the undefined-behaviour sanitizer."""
    folder = tmp_path_factory.mktemp("sanitized")
    compile_files(ALL, SANITIZED, folder / "library.so", linking=("-shared",))
    return objects_in(folder)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library sixteen lanes wide, with its objects beside it."""
    library = tmp_path_factory.mktemp("wide") / "library.so"
    compile_files(ALL, WIDE, library, linking=("-shared",))
    return library


def objects_in(folder: Path) -> tuple[str, ...]:
    return tuple(str(folder / f"{file.stem}.o") for file in ALL)


def output_of(program: Path) -> str:
    """What a driver prints; any complaint of a sanitizer, leaks among them, fails the test."""
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    done = subprocess.run(
        [program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sanitizers_find_nothing(sanitized: tuple[str, ...], tmp_path: Path) -> None:
    """Over every head dimension, both kinds of floats, chunks, decodes and windows, with one to
    three threads."""
    program = tmp_path / "driver"
    compile_files([DRIVER], SANITIZED, program, linking=sanitized)
    assert output_of(program) == "ok\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_blocks_under_sanitizers_and_with_sixteen_lanes(
    sanitized: tuple[str, ...], wide: Path, tmp_path: Path
) -> None:
    """Every kind of blocks, both ways to multiply, full and partly full panels, with one to three
    threads: no sanitizer complains, and a machine with vectors of sixteen lanes (here out of
    pairs) computes the same bits as one with eight."""
    narrow_program, wide_program = tmp_path / "narrow", tmp_path / "wide"
    compile_files([BLOCKS_DRIVER], SANITIZED, narrow_program, linking=sanitized)
    compile_files([BLOCKS_DRIVER], WIDE, wide_program, linking=objects_in(wide.parent))
    lines = output_of(narrow_program)
    assert len(lines.splitlines()) == 3 * 2 * 6 * 4 + 2
    assert lines == output_of(wide_program)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_team_does_each_task_once_without_a_race(tmp_path: Path) -> None:
    """Under the thread sanitizer: what one loop wrote is there for the next, whoever did it, and
    whoever woke late."""
    options = (
        *STRICT, "-O1", "-g", "-fPIC", "-pthread", f"-I{SOURCES}", "-fsanitize=thread",
    )  # fmt: skip
    program = tmp_path / "driver"
    compile_files([SOURCES / "thread_team.cpp", TEAM_DRIVER], options, program)
    assert output_of(program) == "ok\n"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sources_compile_for_avx512(tmp_path: Path) -> None:
    """With all its parts that are used, without a warning of ours. No such processor is needed.
    Pairs of bf16, and of integers with VNNI, are multiplied and added to a sum at once."""
    options = (
        *STRICT, "-Wno-uninitialized",  # in GCC 12's own header
        *target_options(AVX512_BF16), "-O1", "-fPIC", "-pthread",
    )  # fmt: skip
    target = tmp_path / "library.so"
    compile_files(ALL, options, target, linking=("-shared",))
    code = subprocess.run(
        ["objdump", "-d", target], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert "vdpbf16ps" in code
    assert "vpdpwssd" in code
    assert "vpmaddwd" not in code


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["heads of 80", "heads of 64"])
def test_sixteen_lanes_and_rounded_inputs_compute_the_same(wide: Path, name: str) -> None:
    """Same logits in fp32, a small divergence in bf16."""
    library = NativeLibrary(wide)
    assert library.is_wide
    assert library.rounds_inputs
    head_dim = int(name.rpartition(" ")[2])
    shape = Shape.of("qwen2", head_dim=head_dim, group=3, num_layers=1)
    ids = prompts((80,), vocab_size=VOCAB_SIZE, seed=4)[0]
    for dtype, most in (("fp32", 1e-8), ("bf16", 0.01)):
        runner = _runner(library, shape, dtype)
        got, expected = (
            torch.cat(
                [
                    one.logits([scheduled(ids, range(20), start, count)]).float()
                    for start, count in ((0, 30), (30, 49), (79, 1))
                ]
            )
            for one in (runner, general_runner(shape, dtype))
        )
        assert divergence(expected, got) < most


def _runner(library: NativeLibrary, shape: Shape, dtype: str) -> NativeRunner:
    model = make_model(shape, dtype)
    layout = layout_for(shape, dtype, 4)
    packed, rope = packed_model(library, model, layout)
    return NativeRunner(packed, rope, loaded(model).facts, layout, make_pool(layout, 64))
