"""Builds the Swift kit and its test program once, and runs them."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.kits import harness
from tests.kits.cpp_kit import one_at_a_time
from tests.kits.harness import Task
from tests.programs import ran

ROOT = Path(__file__).parents[2]
KIT = ROOT / "runtime" / "swift"
CORE = ROOT / "runtime" / "cpp"  # the kit is a layer over it
KERNELS = ROOT / "runtime" / "native"
PROGRAM = ROOT / "tests" / "kits" / "swift"
TOOLCHAIN = Path(os.environ.get("ODTPACK_SWIFT", ROOT / "build" / "swift"))
SYSTEM = TOOLCHAIN / "root"
LIBRARIES = (SYSTEM / "usr/lib/x86_64-linux-gnu", SYSTEM / "usr/libexec/swift/lib/swift/linux",
             TOOLCHAIN / "lib")  # fmt: skip
RUNTIME = ["-Xcc", f"-I{TOOLCHAIN / 'include'}", "-Xcxx", f"-I{TOOLCHAIN / 'include'}"]
IMPORTS = ["-I", str(CORE / "include"), *RUNTIME[:2]]


def unavailable() -> str | None:
    """None where the kit can be built, otherwise the reason why it cannot."""
    if not (TOOLCHAIN / ".ready").is_file():
        return "no Swift toolchain is set up (run: make swift)"
    return None


def in_toolchain(*command: object, cwd: Path = ROOT) -> None:
    """Run a command inside the toolchain's root, to a good end."""
    environment = {**os.environ, "ODTPACK_SWIFT_BIND": tempfile.gettempdir()}
    ran(ROOT / "scripts" / "swift.sh", *command, cwd=cwd, env=environment)


def _cached(kind: str, sources: list[Path], build: Callable[[Path], None]) -> Path:
    """What is built of sources as they are now, once for all tests."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = TOOLCHAIN / "bin" / f"{kind}-{digest}"
    if not target.exists():
        with one_at_a_time(target.parent):
            if not target.exists():
                build(target)
    return target


def guide(name: str) -> str:
    """A file that the guide shows."""
    text = (ROOT / "docs" / "guides" / "swift.md").read_text()
    (found,) = re.findall(rf"^`{name}`[^\n]*:\n\n```swift\n(.*?)```", text, re.M | re.S)
    return str(found)


def _repository() -> Path:
    """A repository with the kit and its tag, as an app's package names it."""
    parts = [ROOT / "Package.swift", *KIT.rglob("*.*"), *CORE.rglob("*.*"), *KERNELS.rglob("*.*")]

    def commit(target: Path) -> None:
        begun = target.with_name("begun")
        shutil.rmtree(begun, ignore_errors=True)
        for part in (KIT, CORE, KERNELS):
            shutil.copytree(part, begun / "odtpack" / "runtime" / part.name)
        shutil.copy(ROOT / "Package.swift", begun / "odtpack")
        # SwiftPM remembers which commit a tag was: the same files are the same commit.
        fixed = {f"GIT_{who}_DATE": "2026-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        git = ["git", "-c", "user.name=test", "-c", "user.email=test@odtpack.example"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "kit"], ["tag", "0.1.0"]):
            subprocess.run([*git, *words], check=True, cwd=begun / "odtpack",
                           env={**os.environ, **fixed})  # fmt: skip
        begun.rename(target)

    return _cached("repository", sorted(filter(Path.is_file, parts)), commit) / "odtpack"


def apps(folder: Path, programs: dict[str, dict[str, str]]) -> None:
    """Build programs, each of its files and the tagged kit, by Swift's own package manager."""
    package = TOOLCHAIN / "app"
    manifest = guide("Package.swift")
    manifest = manifest.replace("https://odtpack.example/odtpack", str(_repository()))
    (target,) = (line for line in manifest.splitlines() if ".executableTarget(" in line)
    targets = [target.replace('"App"', f'"{name}"') for name in programs]
    texts = {"Package.swift": manifest.replace(target, ",\n".join(targets))}
    for name, files in programs.items():
        texts |= {f"Sources/{name}/{file}": text for file, text in files.items()}
    with one_at_a_time(package):
        shutil.rmtree(package / "Sources", ignore_errors=True)
        for file, text in texts.items():
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(text)
        in_toolchain(
            "swift", "build", "-c", "release", "--disable-sandbox", "-Xswiftc", "-enable-testing",
            *RUNTIME, "-Xlinker", f"-L{TOOLCHAIN / 'lib'}", cwd=package,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for name in programs:
            shutil.copy(package / ".build" / "release" / name, folder)


def built() -> Path:
    """The test program, of the sources as they are now."""
    sources = sorted(PROGRAM.glob("*.swift"))
    files = {path.name: path.read_text() for path in sources}
    name = f"kit-of-{_repository().parent.name}"
    return _cached(name, sources, lambda target: apps(target, {"kit": files})) / "kit"


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
    return ran(*command(built(), *arguments), code=None, timeout=900, **options)


def measure(job: Task, folder: Path) -> dict[str, Any]:
    return harness.measured(run, job, folder)


def train(task: Task, where: str) -> dict[str, Any]:
    """Train in the kit or in ``python``; both take the same task."""
    return harness.trained(measure, task, where)


def benchmark(folder: Path) -> str:
    """What the benchmark prints."""
    return ran(*command(built(), "benchmark", folder, 1, 5 * 10**8)).stdout
