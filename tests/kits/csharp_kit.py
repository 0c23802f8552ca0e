"""Packs the C# kit, and builds a test program that uses the package, once; runs it under Mono."""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.kits import cpp_kit, harness
from tests.kits.harness import Task
from tests.programs import ran

ROOT = Path(__file__).parents[2]
KIT = ROOT / "runtime" / "csharp"
SOURCES = KIT / "src"
PROGRAM = ROOT / "tests" / "kits" / "csharp"
BUILD = ROOT / "build" / "csharp"
ARM64 = ROOT / "build" / "mono-arm64"
WARNINGS = ("-langversion:7", "-unsafe", "-warn:4", "-warnaserror", "-nowarn:1591")


def unavailable() -> str | None:
    """None where the kit can be built, otherwise the reason why it cannot."""
    if not (shutil.which("mcs") and shutil.which("mono")):
        return "Mono is not installed (run: make kits)"
    return cpp_kit.unavailable()


@functools.cache
def core() -> Path:
    """The shared library of the C++ kit behind its C interface."""
    folder = cpp_kit.BUILD / "native"
    cpp_kit.make(cpp_kit.KIT, folder, cpp_kit.cmake_options(), "odtpack-native")
    return folder / "libodtpack.so"


def compiled(target: Path, *words: object) -> Path:
    """Compile C# sources; any warning is an error."""
    ran("mcs", *WARNINGS, f"-out:{target}", *words)
    return target


def _cached(name: str, sources: list[Path], *words: str) -> Path:
    """What is compiled of sources as they are now, once for all tests."""
    given = [*(path.read_bytes() for path in sources), *map(str.encode, words)]
    target = BUILD / hashlib.sha256(b"".join(given)).hexdigest()[:16] / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with cpp_kit.one_at_a_time(BUILD):
        if target.is_file():
            return target
        beside = [f"-doc:{target.with_suffix('.xml')}" if word == "-doc:" else word
                  for word in words]  # fmt: skip
        return compiled(target, *beside, *sources)


def assembly() -> Path:
    """The kit's library, with its documentation beside it."""
    return _cached("Odtpack.dll", sorted(SOURCES.glob("*.cs")), "-target:library", "-doc:")


@functools.cache
def installed() -> Path:
    """The NuGet package of a release, unpacked."""
    from scripts import nupkg  # which packs what this file builds

    digest = hashlib.sha256(assembly().read_bytes() + core().read_bytes()).hexdigest()[:16]
    target = BUILD / "nuget" / digest
    with cpp_kit.one_at_a_time(target.parent), tempfile.TemporaryDirectory() as scratch:
        if not target.is_dir():
            begun = target.with_name("begun")
            shutil.rmtree(begun, ignore_errors=True)
            shutil.unpack_archive(nupkg.write_nupkg(Path(scratch)), begun, "zip")
            begun.rename(target)
    return target


def library() -> Path:
    """The assembly of the NuGet package."""
    (found,) = installed().glob("lib/*/Odtpack.dll")
    return found


def built() -> Path:
    """The test program, which refers to the assembly of the NuGet package."""
    words = ("-r:System.Core.dll", f"-r:{library()}")
    return _cached("OdtpackTests.exe", sorted(PROGRAM.glob("*.cs")), *words)


def command(program: Path, *arguments: object) -> list[str]:
    """A program with the native library and ONNX Runtime where Mono finds them."""
    folder = installed() / "runtimes" / "linux-x64" / "native"
    given = os.environ.get("LD_LIBRARY_PATH", "")
    libraries = f"LD_LIBRARY_PATH={folder}:{cpp_kit.DEPENDENCIES / 'lib'}:{given}".rstrip(":")
    found = f"MONO_PATH={library().parent}"
    return ["env", libraries, found, "mono", str(program), *map(str, arguments)]


def arm64_command(*arguments: object) -> list[str]:
    """The test program under Mono for ARM64, which is emulated."""
    folder = cpp_kit.BUILD / "arm64"
    cpp_kit.make(cpp_kit.KIT, folder, cpp_kit.cmake_options("arm64"), "odtpack-native")
    mono = ARM64 / "usr" / "lib"
    libraries = (folder, cpp_kit.DEPENDENCIES / "lib-arm64", mono, mono / "aarch64-linux-gnu")
    return [
        "env", f"MONO_PATH={mono / 'mono' / '4.5'}:{library().parent}",
        f"MONO_CFG_DIR={ARM64 / 'etc'}",
        *cpp_kit.emulated(ARM64), "-E", f"LD_LIBRARY_PATH={':'.join(map(str, libraries))}",
        str(ARM64 / "usr" / "bin" / "mono-sgen"), str(built()), *map(str, arguments),
    ]  # fmt: skip


def saving(path: Path, external_above: int, before: str) -> list[str]:
    """The program that saves until it is killed."""
    return command(built(), "saves", path, external_above, before)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the test program to its end, whatever that is."""
    return ran(*command(built(), *arguments), code=None, timeout=900, **options)


def measure(job: Task, folder: Path) -> dict[str, Any]:
    return harness.measured(run, job, folder)


def train(task: Task, where: str) -> dict[str, Any]:
    """Train in the kit or in ``python``; both take the same task."""
    return harness.trained(measure, task, where)


def benchmark(folder: Path) -> str:
    """What the benchmark prints."""
    return ran(*command(built(), "benchmark", folder, 1, 5 * 10**8)).stdout
