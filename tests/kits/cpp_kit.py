"""Builds the C++ kit and its programs once, and runs them."""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kits import harness
from tests.kits.harness import Task, job_file
from tests.programs import ran

ROOT = Path(__file__).parents[2]
save_batch = harness.save_batch
KIT = ROOT / "runtime" / "cpp"
KERNELS = ROOT / "runtime" / "native"
PROGRAMS = Path(__file__).parent / "cpp"
DEPENDENCIES = ROOT / "build" / "cpp-deps"
BUILD = ROOT / "build" / "cpp"
SANITIZE = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
# The library keeps what it made until the process ends; the kit's own memory is looked at.
SANITIZERS = {
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
}
VARIANTS: dict[str, list[str]] = {
    "native": [],
    "plain": ["-DCMAKE_CXX_FLAGS_RELEASE=-O0"],  # compiles in a third of the time
    "sanitized": [f"-DCMAKE_CXX_FLAGS=-O0 {SANITIZE}", "-DCMAKE_BUILD_TYPE="],
    "libfuzzer": [
        f"-DCMAKE_CXX_FLAGS=-O1 {SANITIZE}", "-DCMAKE_BUILD_TYPE=", "-DCMAKE_CXX_COMPILER=clang++",
    ],
    "arm64": [
        "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++", "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
    ],
}  # fmt: skip


def unavailable() -> str | None:
    """None where the kit can be built, otherwise the reason why it cannot."""
    if not (DEPENDENCIES / ".ready").is_file():
        return "what the C++ kit is built with is not set up (run: make kits)"
    return None


def without_libfuzzer() -> str | None:
    """None where libFuzzer is there, otherwise the reason why inputs cannot be made with it."""
    return unavailable() or (
        None if shutil.which("clang++") else "clang is not installed (run: make fuzz-kit)"
    )


def cmake_options(variant: str = "native") -> list[str]:
    """What tells CMake where ONNX Runtime, flatbuffers and the compiled kernels are."""
    return [
        *dependencies(variant),
        f"-DCMAKE_PROJECT_INCLUDE={PROGRAMS / 'kernels.cmake'}",
        f"-DODTPACK_TEST_KERNELS={kernels('arm64' if variant == 'arm64' else 'native')}",
    ]


@functools.cache
def kernels(variant: str) -> Path:
    """The native kernels, compiled once for a processor: most programs compile in less time.

    Those of this one come from an installed kit, those of ARM64 from the kit's sources.
    """
    source, folder, options = KIT, BUILD / f"kernels-{variant}", dependencies(variant)
    if variant == "native":
        source = PROGRAMS
        options.append(f"-DCMAKE_PREFIX_PATH={installed()}")
    make(source, folder, options, "odtpack-kernels")
    return folder / "odtpack-kernels" / "libodtpack-kernels.a"


def dependencies(variant: str) -> list[str]:
    """What tells CMake where ONNX Runtime and flatbuffers are."""
    library = DEPENDENCIES / ("lib-arm64" if variant == "arm64" else "lib")
    return [
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DONNXRUNTIME_INCLUDE_DIR={DEPENDENCIES / 'include'}",
        f"-DONNXRUNTIME_LIBRARY={library / 'libonnxruntime.so'}",
        f"-DFLATBUFFERS_INCLUDE_DIR={DEPENDENCIES / 'include'}",
        *VARIANTS[variant],
    ]


@functools.cache
def installed() -> Path:
    """The kit as a release installs it."""
    from scripts import release  # which builds the C# kit too, of this one's sources

    folder = BUILD
    target, stamp = folder / f"odtpack-cpp-{release.version()}", folder / "installed"
    parts = [KIT / "CMakeLists.txt", *(KIT / "cmake").iterdir(), *(KIT / "include").rglob("*.*")]
    parts += [*(KIT / "src").iterdir(), *filter(Path.is_file, KERNELS.rglob("*"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(parts))).hexdigest()
    with one_at_a_time(folder), tempfile.TemporaryDirectory() as scratch:
        if not stamp.is_file() or stamp.read_text() != digest:
            # Objects may be newer than sources that changed.
            for each in (target, BUILD / "kernels-native"):
                shutil.rmtree(each, ignore_errors=True)
            release.cmake(Path(scratch) / "cmake")
            (archive,) = Path(scratch, "cmake").iterdir()
            shutil.unpack_archive(archive, folder, filter="data")
            stamp.write_text(digest)
    return target


@functools.cache
def built(program: str, variant: str = "native") -> Path:
    """Build a program of the kit, or one of the tests with the kit of a release; its path."""
    source, folder, options = KIT, BUILD / variant, cmake_options(variant)
    if program != "measure":
        source, folder = PROGRAMS, folder.with_name(f"tests-{variant}")
        options.append(f"-DCMAKE_PREFIX_PATH={installed()}")
    make(source, folder, options, f"odtpack-{program}")
    return folder / f"odtpack-{program}"


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(source: Path, folder: Path, options: list[str], target: str) -> None:
    """Configure and build a target with CMake; one process at a time in each folder."""
    with one_at_a_time(folder):
        for words in (
            ["cmake", "-S", source, "-B", folder, *options],
            ["cmake", "--build", folder, "--target", target],
        ):
            ran(*words)


def command(program: str, *arguments: object, variant: str = "native") -> list[str]:
    """The words that start a program. Most are one file: the kit's headers take long to compile."""
    apart = program in ("former", "soak")
    words = [built(program, variant)] if apart else [built("programs", variant), program]
    return [str(word) for word in (*words, *arguments)]


def emulated(root: Path) -> list[str]:
    """What runs a program for ARM64, with what it finds at / in a folder."""
    emulator = shutil.which("qemu-aarch64-static")
    assert emulator is not None
    return [emulator, "-cpu", "cortex-a53", "-L", str(root)]


def run(program, *arguments, variant="native", **options):
    """Run a program to its end, whatever that is."""
    words = command(program, *arguments, variant=variant)
    if variant == "arm64":
        words = [*emulated(DEPENDENCIES / "arm64"), *words]
    return ran(
        *words, code=None, timeout=900, env={**os.environ, **SANITIZERS}, **{"input": "", **options}
    )


def saving(path: Path, external_above: int, before: str) -> list[str]:
    """The program that saves until it is killed."""
    return command("saves", path, external_above, before)


def measuring(job: Path) -> list[str]:
    """The command that runs a job of ``odtpack-measure``."""
    return command("measure", job)


def measure(job: Task, folder: Path, variant: str = "native") -> dict[str, Any]:
    """Run a job of ``odtpack-measure``; return what it prints."""
    done = run("measure", job_file(job, folder), variant=variant)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.replace("-nan", "NaN").replace("nan", "NaN")))


def train(task: Task, where: str) -> dict[str, Any]:
    """Train in the kit or in ``python``; both take the same task."""
    return harness.trained(measure, task, where)
