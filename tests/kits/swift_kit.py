"""Builds the Swift kit and its test program once, and runs them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kits.cpp_kit import one_at_a_time

ROOT = Path(__file__).parents[2]
KIT = ROOT / "runtime" / "swift"
CORE = ROOT / "runtime" / "cpp"  # the kit is a layer over it
KERNELS = ROOT / "runtime" / "native" / "src"
PROGRAM = ROOT / "tests" / "kits" / "swift"
TOOLCHAIN = Path(os.environ.get("ODTPACK_SWIFT", ROOT / "build" / "swift"))
SYSTEM = TOOLCHAIN / "root"
LIBRARIES = (SYSTEM / "usr/lib/x86_64-linux-gnu", SYSTEM / "usr/libexec/swift/lib/swift/linux",
             TOOLCHAIN / "lib")  # fmt: skip
RUNTIME = ["-Xcc", f"-I{TOOLCHAIN / 'include'}", "-Xcxx", f"-I{TOOLCHAIN / 'include'}"]
IMPORTS = ["-I", str(CORE / "include"), *RUNTIME[:2]]
LINKS = ["-L", str(TOOLCHAIN / "lib"), "-lonnxruntime", "-lstdc++"]


def unavailable() -> str | None:
    """None where the kit can be built, otherwise the reason why it cannot."""
    if not (TOOLCHAIN / ".ready").is_file():
        return "no Swift toolchain is set up (run: make swift)"
    return None


def in_toolchain(*command: object, cwd: Path = ROOT) -> None:
    """Run a command inside the toolchain's root, to a good end."""
    environment = {**os.environ, "ODTPACK_SWIFT_BIND": tempfile.gettempdir()}
    done = subprocess.run(
        [ROOT / "scripts" / "swift.sh", *map(str, command)],
        capture_output=True, text=True, check=False, cwd=cwd, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def _cached(kind: str, sources: list[Path], build: Callable[[Path], None]) -> Path:
    """What is built of sources as they are now, once for all tests."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = TOOLCHAIN / "bin" / f"{kind}-{digest}"
    with one_at_a_time(target.parent):
        if not target.exists():
            build(target)
    return target


def core() -> Path:
    """The object file of the C interface, with the C++ kit and its native kernels in it."""
    targets = (ROOT / "Package.swift").read_text()
    names = re.findall(r'"(\w+)"', targets.split("let kernels = [")[1].split("]")[0])
    kernels = [KERNELS / f"{name}.cpp" for name in names]
    headers = [path for path in (CORE / "include").rglob("*") if path.is_file()]
    sources = [CORE / "src" / "odtpack.cpp", *kernels]

    def build(target: Path) -> None:
        parts = [target.with_suffix(f".{source.stem}") for source in sources]
        for source, part in zip(sources, parts, strict=True):
            in_toolchain(
                "/usr/libexec/swift/bin/clang++", "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra",
                "-Werror", "-Wno-pass-failed", "-DODTPACK_KERNELS", "-I", CORE / "include",
                "-isystem", TOOLCHAIN / "include", "-c", source, "-o", part,
            )  # fmt: skip
        in_toolchain("ld", "-r", *parts, "-o", target)
        for part in parts:
            part.unlink()

    return _cached("core.o", [*sources, *sorted(headers), *sorted(KERNELS.glob("*.[hi]*"))], build)


def as_module() -> Path:
    """A folder with the kit as a module and a static library."""
    sources = sorted((KIT / "Sources" / "Odtpack").glob("*.swift"))

    def build(target: Path) -> None:
        begun = target.with_name("begun")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir()
        in_toolchain(
            "swiftc", "-emit-library", "-static", "-emit-module", "-module-name", "Odtpack",
            *IMPORTS, *sources, "-o", begun / "libOdtpack.a",
            "-emit-module-path", begun / "Odtpack.swiftmodule",
        )  # fmt: skip
        begun.rename(target)

    return _cached("module", [*sources, CORE / "include" / "odtpack.h"], build)


def built() -> Path:
    """The test program, of the sources as they are now."""
    sources = [*sorted((KIT / "Sources" / "Odtpack").glob("*.swift")), *PROGRAM.glob("*.swift")]
    native = core()
    return _cached(
        "kit",
        [native, *sources],
        lambda target: in_toolchain(
            "swiftc", "-O", "-whole-module-optimization", "-module-name", "kit", *IMPORTS,
            *sources, native, *LINKS, "-o", target,
        ),
    )  # fmt: skip


def command(program: Path, *arguments: object) -> list[str]:
    """A program with the toolchain's libraries: it needs no privileges to run."""
    loader = SYSTEM / "lib64" / "ld-linux-x86-64.so.2"
    path = ":".join([*map(str, LIBRARIES), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
    return [str(loader), "--library-path", path, str(program), *map(str, arguments)]


def saving(path: Path, external_above: int, before: str) -> list[str]:
    """The program that saves until it is killed."""
    return command(built(), "saves", path, external_above, before)


def measuring(job: Path) -> list[str]:
    """The command that runs a job of ``kit measure``."""
    return command(built(), "measure", job)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the test program to its end, whatever that is."""
    return subprocess.run(
        command(built(), *arguments), capture_output=True, text=True, timeout=900, check=False,
        **options,
    )  # fmt: skip


def measure(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a job of ``kit measure``; return what it prints."""
    path = folder / "job.json"
    path.write_text(json.dumps(job, default=str))
    done = run("measure", path)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout))
