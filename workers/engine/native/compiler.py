"""From C++ sources to a library in the user's cache, compiled at first use.

A library is named by what went into it (sources, compiler, flags) and by its own content, so a
file that was cut short or changed is not loaded but compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog

from workers.engine.sources import Progress, default_cache_dir, locked

SOURCES = Path(__file__).parent / "src"
_COMPILER = "g++"
_TIMEOUT_S = 600.0  # 14 s of CPU; many times that on a crowded machine
_OPTIONS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=off",  # every rounding is written down
    "-fno-math-errno",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wno-psabi",  # vectors are never passed between libraries
)
_NEEDED = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"}  # what came with AVX2
_WIDE = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
}
_USED_BESIDE_WIDE = {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"}

_log = structlog.get_logger(__name__)


class NativeUnavailable(Exception):
    """The native path can't be used; the message is the reason, for people."""


def default_library_dir() -> Path:
    """Beside the folder of converted models, in the user's cache."""
    return default_cache_dir().parent / "native"


def compiled_library(
    cache_dir: Path | None = None,
    *,
    more_options: Sequence[str] = (),
    progress: Progress | None = None,
) -> Path:
    """The library for this processor, compiled now if it is not in the cache. Several processes
    may ask at once: one compiles, the others wait.

    Args:
        cache_dir: default: :func:`default_library_dir`.
        more_options: of the compiler, after ours.
        progress: told in words when it has to be compiled; default: the log.

    Raises:
        NativeUnavailable: no compiler, a processor without AVX2, an error of the compiler,
            or a cache that can't be written.
    """
    cache_dir = cache_dir or default_library_dir()
    options = (*_OPTIONS, *target_options(cpu_features()), *more_options)
    compiler = find_compiler()
    key = _key(compiler, options)
    found = _intact(cache_dir, key)
    if found is not None:
        return found
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f"{key}.lock"):
            found = _intact(cache_dir, key)
            return found or _compile(options, cache_dir, key, progress or _log_progress)
    except OSError as error:
        raise NativeUnavailable(f"{cache_dir}: {error.strerror or error}") from error


def find_compiler() -> str:
    """The path of the C++ compiler.

    Raises:
        NativeUnavailable: there is none.
    """
    found = shutil.which(_COMPILER)
    if found is None:
        raise NativeUnavailable(f"no C++ compiler: {_COMPILER} is not on the PATH")
    return found


def cpu_features() -> frozenset[str]:
    """This processor's features, as Linux names them; none where it does not say."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def target_options(features: frozenset[str]) -> tuple[str, ...]:
    """What the compiler may use on a processor with these features.

    Raises:
        NativeUnavailable: it lacks what the sources need.
    """
    if not _NEEDED.keys() <= features:
        raise NativeUnavailable("this processor has no AVX2, FMA and F16C")
    options = [*_NEEDED.values()]
    if _WIDE.keys() <= features:
        options += _WIDE.values()
        options += [option for name, option in _USED_BESIDE_WIDE.items() if name in features]
    return tuple(options)


def _key(compiler: str, options: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in (_output([compiler, "--version"]), *options):
        digest.update(f"{part}\0".encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def _intact(cache_dir: Path, key: str) -> Path | None:
    for file in cache_dir.glob(f"{key}-*.so"):
        if file.stem == f"{key}-{_content_digest(file)}":
            return file
        _log.warning("native_library_broken", file=str(file))
    return None


def _content_digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=12).hexdigest()


def _log_progress(words: str) -> None:
    _log.info("native_library_compiling", words=words)


def _compile(options: Sequence[str], cache_dir: Path, key: str, progress: Progress) -> Path:
    """Compile beside the target, then rename; whoever loads the library sees all of it."""
    progress("compiling the native kernels, once per machine")
    with tempfile.TemporaryDirectory(prefix=f"{key}.part-", dir=cache_dir) as work:
        part = Path(work) / "library.so"
        compile_files(sorted(SOURCES.glob("*.cpp")), options, part, linking=("-shared",))
        for stale in cache_dir.glob(f"{key}-*.so"):
            stale.unlink()
        target = cache_dir / f"{key}-{_content_digest(part)}.so"
        part.rename(target)
    return target


def compile_files(
    files: Sequence[Path], options: Sequence[str], target: Path, *, linking: Sequence[str] = ()
) -> None:
    """Compile each file in a process of its own, as many at once as there are cores, and link them
    into ``target``; objects are written beside it.

    Raises:
        NativeUnavailable: no compiler, or an error in a file.
    """
    compiler = find_compiler()
    largest_first = sorted(files, key=lambda file: -file.stat().st_size)
    objects = [target.parent / f"{file.stem}.o" for file in largest_first]
    commands = [
        [compiler, *options, "-c", str(file), "-o", str(made)]
        for file, made in zip(largest_first, objects, strict=True)
    ]
    num_cores = len(os.sched_getaffinity(0))
    for first in range(0, len(commands), num_cores):
        _run_together(commands[first : first + num_cores])
    _output([compiler, *options, *linking, *map(str, objects), "-o", str(target)])


def _run_together(commands: Sequence[Sequence[str]]) -> None:
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=_TIMEOUT_S)
            _check(process.args, process.returncode, errors)  # type: ignore[arg-type]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    _check(command, done.returncode, done.stderr)
    return done.stdout


def _check(command: Sequence[str], status: int, errors: str) -> None:
    if status != 0:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines()
        reason = lines[0] if lines else f"exit status {status}"
        raise NativeUnavailable(f"{Path(command[0]).name} failed: {reason}")
