"""The library is compiled once, checked before it is loaded, and not needed to serve a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from schemas.errors import ConfigError
from tests.workers.engine.conftest import TinyFolder
from tests.workers.engine.torch_engines import small_engine
from workers.engine.native import compiler, load
from workers.engine.native.compiler import NativeUnavailable, compiled_library, target_options
from workers.engine.native.library import NativeLibrary

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of another, tiny library."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder


def test_a_library_is_compiled_once(sources: Path, tmp_path: Path) -> None:
    """The second caller gets the first one's file; other sources or options give another, and the
    old one is gone."""
    cache = tmp_path / "cache"
    first = compiled_library(cache)
    written = first.stat().st_mtime_ns
    with capture_logs() as lines:
        assert compiled_library(cache) == first
    assert not lines
    assert first.stat().st_mtime_ns == written
    other = compiled_library(cache, more_options=("-O1",))
    (sources / "two.cpp").write_text('extern "C" int two() { return 2; }\n')
    assert len({first, other, compiled_library(cache)}) == 3
    assert {file.suffix for file in cache.iterdir()} == {".so", ".lock"}


@pytest.mark.parametrize("damage", [b"", b"\x7fELF, but then nothing"])
def test_a_broken_file_is_compiled_again(sources: Path, tmp_path: Path, damage: bytes) -> None:
    """Cut short or overwritten: found before it is loaded, said, and replaced."""
    cache = tmp_path / "cache"
    first = compiled_library(cache)
    content = first.read_bytes()
    first.write_bytes(damage)
    with capture_logs() as lines:
        again = compiled_library(cache)
    assert again.read_bytes() == content
    assert lines[0]["event"] == "native_library_broken"
    assert lines[-1]["event"] == "native_library_compiling"


def test_errors_of_the_compiler_are_the_reason(sources: Path, tmp_path: Path) -> None:
    """The first error line is passed on, and nothing is left in the cache."""
    (sources / "bad.cpp").write_text("int wrong = name_of_nothing;\n")
    with pytest.raises(NativeUnavailable, match=r"g\+\+ failed: .*name_of_nothing"):
        compiled_library(tmp_path / "cache")
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_the_reason(sources: Path, tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(NativeUnavailable, match="cache: File exists"):
        compiled_library(tmp_path / "cache")


def test_options_follow_from_the_processor() -> None:
    """AVX2, FMA and F16C are needed; AVX-512 is used when all of it is there."""
    with pytest.raises(NativeUnavailable, match="no AVX2, FMA and F16C"):
        target_options(frozenset({"sse4_2", "avx2"}))
    assert "-mavx512f" not in target_options(AVX2 | {"avx512f", "avx512_bf16"})
    assert {"-mavx512vl", "-mavx512f"} <= set(target_options(AVX512))
    assert "-mavx512bf16" in target_options(AVX512 | {"avx512_bf16"})


def test_a_file_that_is_no_library_is_the_reason(tmp_path: Path) -> None:
    """What the loader of the operating system refuses."""
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(NativeUnavailable, match="can't be loaded"):
        NativeLibrary(tmp_path / "x.so")


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither a library in the cache nor a compiler on the PATH."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fresh"))
    monkeypatch.setenv("PATH", "")
    load.load_library.cache_clear()
    yield
    load.load_library.cache_clear()


def test_without_a_compiler_the_general_path_serves(
    no_compiler: None, tiny_folder: TinyFolder
) -> None:
    """One log line says why; asking for native kernels by name is refused with the same reason."""
    folder = tiny_folder("llama")
    with capture_logs() as lines:
        assert small_engine(folder, kernels="auto").info.kind == "torch"
    reason = "no C++ compiler: g++ is not on the PATH"
    assert [line.get("reason") for line in lines] == [reason]
    with pytest.raises(ConfigError, match=r"can't be used: no C\+\+ compiler"):
        small_engine(folder, kernels="native")


def test_other_architectures_take_the_general_path(tiny_folder: TinyFolder) -> None:
    """With the reason, before anything is compiled or loaded."""
    with capture_logs() as lines:
        assert small_engine(tiny_folder("gpt2"), kernels="auto").info.kind == "torch"
    (line,) = (line for line in lines if line["event"] == "general_path_chosen")
    assert line["reason"].startswith("gpt2 is none of llama, mistral")


def test_a_failed_self_test_leads_to_the_general_path(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that computes something else is not used; the model is loaded again."""
    right = load.probe_logits

    def shifted(runner: object, **sizes: int) -> object:
        logits = right(runner, **sizes)  # type: ignore[arg-type]
        return logits.roll(1, -1) if isinstance(runner, load.NativeRunner) else logits

    monkeypatch.setattr(load, "probe_logits", shifted)
    with capture_logs() as lines:
        assert small_engine(tiny_folder("llama"), kernels="auto").info.kind == "torch"
    (line,) = (line for line in lines if line["event"] == "general_path_chosen")
    assert "self-test failed" in line["reason"]
